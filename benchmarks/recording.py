"""What recording costs: the paper's MNIST run with and without it, in turns; time, resident memory, bytes on disk.

python benchmarks/recording.py [--repeats 5] [--steps 3000] [--threads 1 2] [--folder runs/benchmark] [--before COMMIT]

With ``--before`` an earlier version of dualform takes its turns, too. Each run has a process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from paper_run import BATCH, STEPS, images, machine, save, train

HERE = Path(__file__).parent


class Resident:
    """The largest resident memory of this process while it is watched, in bytes above where it began."""

    def __enter__(self):
        self.begin, self.most, self.stop = self._now(), 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()

    def _now(self):
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def _watch(self):
        while not self.stop.wait(0.05):
            self.most = max(self.most, self._now() - self.begin)


def alone(steps, threads, folder):
    """One run, in this process: prints its seconds, and how much memory it took more."""
    torch.set_num_threads(threads)
    x, y = images("train")
    train(x, y, folder, steps=100)
    with Resident() as resident:
        begin = time.perf_counter()
        train(x, y, folder, steps)
        seconds = time.perf_counter() - begin
    print(json.dumps([seconds, resident.most / 1e6]))


def one(asked, threads, source, folder=None):
    """One run in a process of its own, with the dualform that lies at ``source``."""
    command = [sys.executable, __file__, "--alone", "--steps", str(asked.steps), "--threads", str(threads)]
    command += ["--folder", str(folder)] if folder else ["--bare"]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(asked, threads, before):
    """All runs in turns; one line a repeat."""
    lines, ratios, grown, slower = [], [], [], []
    now = HERE.parent / "src"
    for turn in range(asked.repeats):
        runs = {"bare": (now, None), "now": (now, asked.folder)}
        if before:  # an earlier version may not know what a later one wrote
            runs["before"] = before, asked.folder.with_name(f"{asked.folder.name}-before")
        order = list(runs) if turn % 2 else list(runs)[::-1]  # none always comes first
        found = {kind: one(asked, threads, *runs[kind]) for kind in order}
        (bare, _), (recorded, more) = found["bare"], found["now"]
        ratios.append(recorded / bare)
        grown.append(more)
        line = f"| {threads} | {turn + 1} | {bare:.1f} | {recorded:.1f} | {ratios[-1]:.3f} | {more:.0f} |"
        if before:
            slower.append(recorded / found["before"][0])
            line += f" {found['before'][0]:.1f} | {slower[-1]:.3f} |"
        print(line, flush=True)
        lines.append(line)
    line = f"| {threads} | **median** | | | **{statistics.median(ratios):.3f}** | **{statistics.median(grown):.0f}** |"
    return [*lines, line + (f" | **{statistics.median(slower):.3f}** |" if before else "")]


@contextmanager
def source_of(commit):
    """The source of an earlier version, or None."""
    if commit is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        tar = subprocess.run(["git", "archive", commit, "src"], cwd=HERE.parent, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=tar.stdout, check=True)
        yield Path(folder) / "src"


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--folder", type=Path, default=Path("runs/benchmark"))
    options.add_argument("--before", metavar="COMMIT")
    options.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.alone:
        alone(asked.steps, asked.threads[0], None if asked.bare else asked.folder)
        return
    with source_of(asked.before) as before:
        table = "\n".join(line for threads in asked.threads for line in measure(asked, threads, before))
    disk = sum(file.stat().st_size for file in asked.folder.rglob("*") if file.is_file())
    visits = asked.steps * BATCH
    more = f" recorded by {asked.before}, s | now / {asked.before} |" if asked.before else ""
    save(
        "recording",
        f"""MLP 784-800-800-10 on MNIST, {asked.steps:,} steps of {BATCH}, float16 memory, certificate included. With as
many threads as the machine has cores the writer and the training loop share them; with one less it has its own.

| torch threads | repeat | unrecorded, s | recorded, s | ratio | resident memory grew by, MB |{more}
|---|---|---|---|---|---|{"---|---|" if asked.before else ""}
{table}

On disk: {disk / 1e9:.2f} GB, {disk / visits:,.0f} bytes a visit. Machine: {machine()}.""",
    )


if __name__ == "__main__":
    main()
