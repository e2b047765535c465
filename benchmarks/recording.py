"""What recording costs: the paper's MNIST run with and without it, in turns; time, resident memory, bytes on disk.

python benchmarks/recording.py [--repeats 5] [--steps 3000] [--threads 1 2] [--folder runs/benchmark]
"""

import argparse
import statistics
import threading
import time
from pathlib import Path

import torch
from paper_run import BATCH, STEPS, images, machine, save, train


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


def measure(x, y, asked, threads):
    """Both runs in turns; one line a repeat."""
    torch.set_num_threads(threads)
    train(x, y, steps=100)
    train(x, y, asked.folder, steps=100)
    lines, ratios, grown = [], [], []
    for turn in range(asked.repeats):
        times = {}
        for recorded in (False, True) if turn % 2 else (True, False):  # neither always comes first
            with Resident() as resident:
                begin = time.perf_counter()
                train(x, y, asked.folder if recorded else None, asked.steps)
                times[recorded] = time.perf_counter() - begin
            if recorded:
                grown.append(resident.most / 1e6)
        ratios.append(times[True] / times[False])
        lines.append(
            f"| {threads} | {turn + 1} | {times[False]:.1f} | {times[True]:.1f} | {ratios[-1]:.3f} | {grown[-1]:.0f} |"
        )
        print(lines[-1], flush=True)
    lines.append(
        f"| {threads} | **median** | | | **{statistics.median(ratios):.3f}** | **{statistics.median(grown):.0f}** |"
    )
    return lines


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--folder", type=Path, default=Path("runs/benchmark"))
    asked = options.parse_args()
    x, y = images("train")
    table = "\n".join(line for threads in asked.threads for line in measure(x, y, asked, threads))
    disk = sum(file.stat().st_size for file in asked.folder.rglob("*") if file.is_file())
    visits = asked.steps * BATCH
    save(
        "recording",
        f"""MLP 784-800-800-10 on MNIST, {asked.steps:,} steps of {BATCH}, float16 memory, certificate included. With as
many threads as the machine has cores the writer and the training loop share them; with one less it has its own.

| torch threads | repeat | unrecorded, s | recorded, s | ratio | resident memory grew by, MB |
|---|---|---|---|---|---|
{table}

On disk: {disk / 1e9:.2f} GB, {disk / visits:,.0f} bytes a visit. Machine: {machine()}.""",
    )


if __name__ == "__main__":
    main()
