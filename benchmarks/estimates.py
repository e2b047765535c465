"""How right are the sentences "this will take about 40 s"? Each operation runs once, and what it said is compared.

It is read from standard error, in the words that a user reads ("15 s", "2 min"). Seconds are those of the
processor, so that other programs change nothing; trainings in processes of their own are measured by the clock.

    python benchmarks/estimates.py [--steps 6000] [--folder runs] [--reuse]
"""

import argparse
import io
import re
import sys
import time
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path

import torch
from paper_run import machine, save
from torch import nn

import dualform
from dualform import progress
from dualform.models import MLP
from dualform.progress import LONG, PassTime

SENTENCE = re.compile(r"dualform: (.*): this will take about (\d+) (s|min|h)\.")
SECONDS = {"s": 1, "min": 60, "h": 3600}
WIDTHS = 784, 512, 10
BATCH, EXAMPLES = 64, 6400


class Heard(io.StringIO):
    """Standard error, and the moment at which something was first written to it."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.first = clock, None

    def write(self, text: str) -> int:
        self.first = self.clock() if self.first is None else self.first
        return super().write(text)


def recorded(path: Path, optimizer_class, rate: float, steps: int, x, y, reuse: bool):
    if reuse and path.exists() and dualform.open(path).step == steps:
        return dualform.open(path).load_into(MLP(*WIDTHS), progress=False)
    torch.manual_seed(0)
    model = MLP(*WIDTHS)
    optimizer = optimizer_class(model.parameters(), lr=rate)
    with dualform.record(model, optimizer, path, replay=True, overwrite=True, progress=False) as tape:
        order = torch.cat([torch.randperm(EXAMPLES) for _ in range(-(-steps * BATCH // EXAMPLES))])
        for index in order[: steps * BATCH].split(BATCH):
            tape.note(index=index, label=y[index], part=index % 20)
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=6000)
    options.add_argument("--queries", type=int, default=1500)
    options.add_argument("--folder", type=Path, default=Path("runs"))
    options.add_argument(
        "--least", type=float, default=LONG, help="seconds from which on an operation announces itself"
    )
    options.add_argument("--reuse", action="store_true", help="take memories of an earlier run that are in the folder")
    asked = options.parse_args()
    progress.LONG = asked.least
    torch.set_num_threads(1)
    torch.manual_seed(0)
    y = torch.arange(EXAMPLES) % 10
    x = torch.randn(10, 784)[y] + torch.randn(EXAMPLES, 784)
    models = {
        name: recorded(asked.folder / f"estimates-{name}", kind, rate, steps, x, y, asked.reuse)
        for name, kind, rate, steps in (
            ("SGD", torch.optim.SGD, 0.01, asked.steps),
            ("Adam", torch.optim.Adam, 1e-4, asked.steps // 10),
        )
    }
    print(f"recorded {asked.steps} and {asked.steps // 10} steps of {BATCH} examples", flush=True)

    def memory(name):  # opened anew: nothing is cached
        return dualform.open(asked.folder / f"estimates-{name}")

    def run(name):
        return memory(name).replay(models[name], *dualform.tasks.classification(x, y))

    many, few = x[: asked.queries], x[:40]
    checked = run("SGD")
    retrained = run("SGD")
    retrained._reference.progress = False
    retrained.check()
    retrained._reference.progress = True
    operations = {
        "a question by SGD, all slots of a layer": lambda: (
            memory("SGD").attend(models["SGD"], many).top(10, layer="fc1", per="slot")
        ),
        "a question by Adam, all slots of a layer": lambda: (
            memory("Adam").attend(models["Adam"], few).top(10, layer="fc1", per="slot")
        ),
        "a ledger by Adam, 20 groups": lambda: memory("Adam").ledger("part"),
        "a full check by Adam": lambda: memory("Adam").check(models["Adam"], full=True),
        "a replay": checked.check,
        "a retraining": lambda: retrained.retrain(without="part = 3"),
        "8 retrainings, 2 at a time (`dualform evaluate`)": lambda: dualform.evaluate.removal_runs(
            retrained.retraining(x[:5], processes=2), EXAMPLES, 0.1, 8
        ),
        "influence through training": lambda: retrained.influence(x[:2]),
    }
    lines, within = [], []
    for name, operation in operations.items():
        clock = time.perf_counter if "at a time" in name else time.process_time
        progress.PassTime = partial(PassTime, clock=clock)
        begin = clock()
        with redirect_stderr(Heard(clock)) as heard:
            operation()
        took = clock() - begin
        sentences = SENTENCE.findall(heard.getvalue())
        if len(sentences) > 1:
            print(f"several sentences: {sentences}", file=sys.stderr)
        if not sentences:
            lines.append(f"| {name} | nothing | | {took:.0f} s | |")
        else:
            _, number, unit = sentences[0]
            said = int(number) * SECONDS[unit]
            within.append(max(said / took, took / said))
            lines.append(f"| {name} | {number} {unit} | {heard.first - begin:.1f} | {took:.0f} s | {said / took:.2f} |")
        print(lines[-1], flush=True)
    save(
        "estimates",
        f"""MLP {" – ".join(map(str, WIDTHS))}, {asked.steps * BATCH:,} visits (Adam: a tenth). An operation
that seems to take {asked.least:.0f} s or more says so, after a hundredth of it and half a second or more. What it
said beside what it took; the largest factor between them is {max(within):.2f}.

| operation | said | after, s | took | said / took |
|---|---|---|---|---|
{chr(10).join(lines)}

Machine: {machine()}, 1 thread. Seconds of the processor, by the clock for trainings at a time.""",
    )


if __name__ == "__main__":
    main()
