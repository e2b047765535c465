"""What a question about the whole network costs: the top examples of a few images, under SGD and under AdamW.

python benchmarks/whole_network.py [--steps 300] [--repeats 3]
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from paper_run import machine, save, seconds
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.data import mnist
from dualform.models import MLP

BATCH, BAR = 128, 10
RULES: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD, momentum": partial(optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(optim.AdamW, lr=1e-3),
}
QUESTIONS: tuple[Callable[..., Any], ...] = (
    lambda memory, model, x: memory.attend(model, x).top(10, progress=False),
    lambda memory, model, x: memory.attend(model, x).by("label", progress=False),
    lambda memory, model, x: memory.attend(model, x).top(10, layer="fc2", per="slot", progress=False),
)


def train(
    model: nn.Module, optimizer: optim.Optimizer, path: Path, x: torch.Tensor, y: torch.Tensor, steps: int
) -> float:
    """Record a training; returns the seconds of the same training without recording."""

    def loop(note: Callable[[torch.Tensor], None]) -> None:
        for step in range(steps):
            index = torch.arange(BATCH * step, BATCH * (step + 1)) % len(x)
            note(index)
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()

    with dualform.record(model, optimizer, path, progress=False) as tape:
        loop(lambda index: tape.note(index=index, label=y[index]))
    return seconds(lambda: loop(lambda index: None))[0]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--repeats", type=int, default=3)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    x, y = mnist("train").images, mnist("train").labels
    x = x.flatten(1).float() / 255
    asked = mnist("test").images[:64].flatten(1).float() / 255
    rows, slowest = [], 0.0
    for name, make in RULES.items():
        torch.manual_seed(0)
        model = MLP(784, 800, 800, 10)
        with tempfile.TemporaryDirectory() as folder:
            plain = train(model, make(model.parameters()), Path(folder) / "run", x, y, arguments.steps)
            memory = dualform.open(Path(folder) / "run")
            cells = []
            for ask in QUESTIONS:
                for queries in (1, 8):
                    question = partial(ask, memory, model, asked[:queries])
                    taken = [seconds(question)[0] for _ in range(arguments.repeats)]
                    cells.append(f"{statistics.median(taken):.2f}")
            if name == "AdamW":
                slowest = float(cells[0])
        rows.append(f"| {name} | {plain:.1f} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    verdict = "reached" if slowest <= BAR else "missed"
    visits = f"{arguments.steps * BATCH:,}"
    head = f"""MLP 784-800-800-10 on MNIST, {arguments.steps} steps of {BATCH}: {visits} visits, in float16. CPU
seconds of one thread, median of {arguments.repeats}, with the forward pass of the queries. `top` and `by` are about all
layers together; the last two columns are the best slots of one layer. Under AdamW the parts of groups are kept
after the first question of several queries, so the median is that of a later one.

| optimiser | training | top(10), 1 query | 8 queries | by("label"), 1 query | 8 queries | slots of fc2 | 8 queries |
|---|---|---|---|---|---|---|---|"""
    said = f"A question over all layers under AdamW takes {slowest:.1f} s; {BAR} s were allowed: {verdict}."
    save("whole-network", "\n".join([head, *rows, "", said, "", f"Machine: {machine()}, 1 torch thread."]))


if __name__ == "__main__":
    main()
