"""Interrupts a recording (Ctrl-C, SIGINT) again and again, and sees that no complete step is lost and nothing is wrong.

    python benchmarks/interrupts.py --count 1000 --seed 0

Small networks and one of the README's size are trained in processes of their own, with slots and with ledgers. They are
interrupted at random instants, from outside, and at chosen lines: in every hook, in the optimiser's step, in digest,
hand-over, flush and close. Half of the loops go on inside the same ``with`` after an interrupt, the others leave it.
Afterwards every memory is compared with a training that nobody recorded or disturbed: its steps, its weights, its
visits and its certificate; and some are resumed from a checkpoint and brought to the end.

Further runs have an error raised at such a line in place of a signal (as an exhausted memory would be): there a memory
may end earlier if it says so, and still nothing may be wrong.
"""

import argparse
import json
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from interrupted_line import Aim, Injected, fail, interrupt
from interrupted_run import BATCH, CASES, EVERY, STEPS, Case, Run, States, bring_to_the_end, judge, undisturbed
from paper_run import machine, save

import dualform
from dualform.errors import DualformError, DualformWarning
from dualform.record.shards import shard_builder

COUNT = 1000
SHOTS = 3
"""Interrupts that a run is to get."""

PATIENCE = 120
"""Seconds after which a run counts as hanging."""


class Armed:
    """The user's own handler: an interrupt counts while a run is under way."""

    def __init__(self) -> None:
        self.on, self.late = False, 0
        signal.signal(signal.SIGINT, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.on:
            raise KeyboardInterrupt
        self.late += 1


def child(number: int, how: str, seed: int) -> None:
    """Run a case, disturbed, as often as is asked for, and print what was found: one line a run."""
    case, luck, armed = CASES[number], random.Random(f"{number} {how} {seed}"), Armed()
    shard_builder.DIGEST_STEPS = 3
    expected = undisturbed(case)
    if case.strict:
        warnings.simplefilter("error")
    catch = (KeyboardInterrupt, DualformWarning) if how != "error" else (Injected, DualformWarning, DualformError)
    with tempfile.TemporaryDirectory(prefix="dualform-interrupts-") as folder:
        lines = count_lines(case, expected, Path(folder) / "first")
        for turn, _ in enumerate(iter(sys.stdin.readline, "")):
            run = Run(case, expected, Path(folder) / str(turn), leaves=bool(turn % 2))
            places = sorted(lines) if how == "line" else ["digest", "hand-over", "flush", "close"]
            targets = {(place, luck.randint(1, lines[place])) for place in luck.choices(places, k=SHOTS)}
            aim = Aim(targets, interrupt) if how == "line" else Aim(set(), fail)
            if how == "error":  # at the first line of an __exit__ an error leaves everything as it is, whoever wrote it
                aim = Aim(targets, fail, spared="__exit__")
            print("go", flush=True)
            with warnings.catch_warnings(record=not case.strict) as caught:
                begin = time.perf_counter()
                one(run, aim, armed, catch, how)
                seconds = time.perf_counter() - begin
            run.said += [f"DualformWarning: {warning.message}" for warning in caught or ()]
            wrong, short = judge(run), False
            if how == "error" and says_where_it_ends(run):
                short = any(line.startswith("lost") for line in wrong)
                wrong = [line for line in wrong if not line.startswith(("lost", "other: it says"))]
            elif turn % 4 < 2 and run.checkpoint and not wrong and run.done >= run.checkpoint["step"]:
                wrong = bring_to_the_end(run)
            report = {"hit": aim.hit, "late": armed.late, "wrong": wrong, "short": short, "seconds": seconds}
            print(json.dumps(report), flush=True)


def says_where_it_ends(run: Run) -> bool:
    """Whether the memory says that it was not closed, or the recorder said which steps are missing."""
    if any("not written" in line or "The memory stands at step" in line for line in run.said):
        return True
    return run.left_by is not None and dualform.open(run.path).store.manifest.ended is None


def one(run: Run, aim: Aim, armed: Armed, catch: tuple[type[BaseException], ...], how: str) -> None:
    """A disturbed run; also what comes while the loop is not looking is caught."""
    armed.on = True
    try:
        if how != "instant":
            aim.begin()
        run.train(catch, aim.begin if how != "instant" else lambda: None)
    except catch as error:
        run.left_by = error
    while armed.on:
        with suppress(KeyboardInterrupt):
            sys.settrace(None)
            armed.on = False
    run.look()


def count_lines(case: Case, expected: States, path: Path) -> Counter[str]:
    """How many lines each place has in a run that nobody disturbs."""
    aim = Aim(set(), lambda: None)
    aim.begin()
    Run(case, expected, path, leaves=False).train((DualformWarning,) if case.strict else (), aim.begin)
    sys.settrace(None)
    return aim.lines


@dataclass
class Tally:
    """What the runs of one kind came to."""

    runs: int = 0
    sent: int = 0
    hit: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    short: int = 0
    """Memories that lack complete steps after an error, and say so."""

    def of(self, *kinds: str) -> int:
        return sum(line.startswith(kinds) for line in self.wrong)

    @property
    def line(self) -> str:
        others = len(self.wrong) - self.of("lost", "half", "weights", "lie")
        found = self.of("lost"), self.of("half", "weights"), self.of("lie"), others
        return " | ".join(map(str, (self.runs, self.sent, *found))) + " |"


def disturb(number: int, how: str, shots: int, seed: int) -> Tally:
    """Let a process run a case until it was hit so often; in ``instant`` the signals come from here."""
    tally, luck, late, lasts = Tally(), random.Random(seed), 0, 0.3
    command = [sys.executable, __file__, "--child", str(number), how, str(seed)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        while tally.sent < shots:
            print("again", file=process.stdin, flush=True)
            process.stdout.readline()  # it goes
            sent = 0
            while how == "instant" and sent < SHOTS:
                if select.select([process.stdout], [], [], luck.uniform(0, 2 * lasts / SHOTS))[0]:
                    break
                process.send_signal(signal.SIGINT)
                sent += 1
            if not select.select([process.stdout], [], [], PATIENCE)[0]:
                process.kill()
            line = process.stdout.readline()
            if not line:
                tally.wrong.append(f"other: the process failed: {process.stderr.read()[-1500:]}")
                break
            report = json.loads(line)
            lasts = 0.7 * lasts + 0.3 * report["seconds"]
            tally.runs += 1
            tally.sent += (sent - report["late"] + late) if how == "instant" else sum(report["hit"].values())
            tally.hit.update(report["hit"])
            tally.wrong += report["wrong"]
            tally.short += report["short"]
            late = report["late"]
        process.stdin.close()
    return tally


WAYS = {
    "line": ("SIGINT at a line", 0.6),
    "instant": ("SIGINT at an instant", 0.5),
    "error": ("error at a line", 0.15),
}
"""How trainings are disturbed: what the page calls it, and its share of the count."""


def main(count: int, seed: int, jobs: int) -> int:
    """Disturb all cases, and print what came of it."""
    begin, rows, places, wrong, total = time.perf_counter(), [], Counter[str](), [], Counter[str]()
    work = [(number, how) for how in WAYS for number in range(len(CASES))]
    with ThreadPoolExecutor(jobs) as pool:
        shots = [max(1, round(count * WAYS[how][1] / len(CASES))) for _, how in work]
        tallies = pool.map(disturb, *zip(*work, strict=True), shots, [seed] * len(work))
        for (number, how), tally in zip(work, tallies, strict=True):
            name, title = CASES[number].name, WAYS[how][0]
            rows.append(f"| {name} | {title} | {tally.line}")
            print(rows[-1], *sorted(set(tally.wrong))[:5], sep="\n", flush=True)
            wrong += [f"{name}, {title}: {line}" for line in tally.wrong]
            total[how] += tally.sent
            total["short"] += tally.short
            places.update(tally.hit if how == "line" else {})
    signals = total["line"] + total["instant"]
    text = page(rows, places, wrong, signals, total, seed, jobs, time.perf_counter() - begin)
    if count >= COUNT:
        save("interrupts", text)
    else:
        print(text)
    return int(bool(wrong))


def page(
    rows: list[str],
    places: Counter[str],
    wrong: list[str],
    signals: int,
    total: Counter[str],
    seed: int,
    jobs: int,
    seconds: float,
) -> str:
    table, where = "\n".join(rows), "\n".join(f"| {place} | {hits} |" for place, hits in sorted(places.items()))
    said = "".join(f"- {line}\n" for line in wrong[:20])
    runs = f"runs of {STEPS} steps of {BATCH}, up to {SHOTS} a run"
    return f"""{signals:,} interrupts (SIGINT) and {total["error"]} errors in {runs}.
Each run flushes after {EVERY} steps and looks steps through after three. {len(wrong)} problems.

    python benchmarks/interrupts.py --seed {seed} --jobs {jobs}    # {seconds:.0f} s

| training | disturbed by | runs | times | lost steps | wrong weights | certificates that lie | other problems |
|---|---|---|---|---|---|---|---|
{table}

A step is lost if the optimiser had taken it and the memory does not hold it. After an error that is counted if nothing
says so; {total["short"]} memories end before the last step and say so, or the recorder did.
Weights are wrong if they are further from those of a training that nobody recorded or disturbed than 1e-10 of their
way (784-64-10, trained in float32: 2e-2) and than 10 × the full check. A certificate lies if it and the full sum differ
by more than 10 × and 10 × the rounding floor. With Adam 784-64-10 is kept in float32, and the small networks have no
bias before the normalisation: there certificates are off for other reasons than interrupts. Errors come in digest,
hand-over, flush and close, but not at lines of `__exit__` itself. Other problems are visits of other examples, hooks
left on the model, a memory that does not say how it ended, a resume that fails. The lines of the interrupts were:

| inside | interrupts |
|---|---|
{where}

{said}Machine: {machine()}."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=COUNT, help=f"fewer than {COUNT} are printed only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="trainings that run side by side")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.child is None:
        sys.exit(main(chosen.count, chosen.seed, chosen.jobs))
    child(int(chosen.child[0]), chosen.child[1], int(chosen.child[2]))
