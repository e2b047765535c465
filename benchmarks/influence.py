"""What influence through training costs: one query, and many together, each as a multiple of plain training.

python benchmarks/influence.py [--only mnist-mlp] [--queries 100]
"""

import argparse
import copy
import ctypes
import statistics
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from paper_run import machine, save, seconds
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.data import mnist, small_digits
from dualform.models import MLP

BUDGET = 300_000_000
ONE, MANY = 5, 3
"""The bars: one query, and one of many."""


class Setting(NamedTuple):
    """A network, its optimiser and the length of its training."""

    name: str
    make: Callable[[], nn.Module]
    optimizer: Callable[..., optim.Optimizer]
    images: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    steps: int
    batch: int
    clip: float | None = None
    most_queries: int = 100
    """Fewer where a hundred would take hours."""


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 10),
    )  # fmt: skip


def small():
    images, labels = small_digits()
    return images.flatten(1).float() / 16, labels


def large(flat=True):
    images, labels = mnist("train")
    images = images[:6100].float() / 255
    return (images.flatten(1) if flat else images), labels[:6100]


adamw = partial(optim.AdamW, lr=1e-3)
momentum = partial(optim.SGD, lr=0.01, momentum=0.9)
SETTINGS = (
    Setting("MLP 64-128-64-10, SGD", lambda: MLP(64, 128, 64, 10), partial(optim.SGD, lr=0.1), small, 300, 50),
    Setting("the same, Adam", lambda: MLP(64, 128, 64, 10), partial(optim.Adam, lr=1e-3), small, 300, 50),
    Setting("the same, AdamW, clipped", lambda: MLP(64, 128, 64, 10), adamw, small, 300, 50, 1.0),
    Setting("MLP 784-16-16-10, AdamW", lambda: MLP(784, 16, 16, 10), adamw, large, 94, 64),
    Setting("MLP 784-800-800-10, momentum", lambda: MLP(784, 800, 800, 10), momentum, large, 100, 128, 1.0, 8),
    Setting("CNN 16-32 channels, AdamW", convolutional, adamw, partial(large, flat=False), 60, 64, None, 8),
)


def train(setting, model, x, y, order, path=None):
    """Train, recorded if there is a path."""
    optimizer = setting.optimizer(model.parameters())
    tape = dualform.record(model, optimizer, path, keep="replay", progress=False) if path else None
    with tape or nullcontext():
        take_steps(setting, model, optimizer, x, y, order, tape)


def take_steps(setting, model, optimizer, x, y, order, tape):
    for index in order:
        if tape:
            tape.note(index=index)
        F.cross_entropy(model(x[index]), y[index]).backward()
        if setting.clip:
            nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad()


def growth(work):
    """By how many bytes this process grows at most while it works (Linux alone tells)."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def resident(which):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(which))


def measure(setting, queries, repeats):
    """The line of a table, and the two ratios of the bars."""
    queries = min(queries, setting.most_queries)
    x, y = setting.images()
    train_size = len(x) - queries
    torch.manual_seed(0)
    model, order = setting.make(), [torch.randperm(train_size)[: setting.batch] for _ in range(setting.steps)]
    first = copy.deepcopy(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        train(setting, model, x, y, order, f"{folder}/memory")
        memory = dualform.open(f"{folder}/memory")
        ratios = []
        for _ in range(repeats):
            model.load_state_dict(first)
            plain, _ = seconds(lambda: train(setting, model, x, y, order))
            run = memory.replay(model, *dualform.tasks.classification(x, y))
            check, answer = seconds(run.check)
            assert answer.exact, answer
            one, _ = seconds(partial(run.influence, x[train_size : train_size + 1], progress=False))
            many, _ = seconds(partial(run.influence, x[train_size:], progress=False))
            direct, _ = seconds(partial(run.direct, x[train_size:], progress=False))
            ratios.append([check / plain, one / plain, many / plain / queries, direct / plain / queries, plain])
        tight = memory.replay(model, *dualform.tasks.classification(x, y), budget=BUDGET)
        tight.check()
        grown = growth(lambda: tight.influence(x[train_size:], progress=False))
    check, one, each, direct, plain = (statistics.median(column) for column in zip(*ratios, strict=True))
    name = setting.name if queries == 100 else f"{setting.name} ({queries} queries)"
    cells = [name, f"{1000 * plain / setting.steps:.2f} ms", f"{check:.1f}", f"{one:.1f}", f"{each:.2f}"]
    return f"| {' | '.join([*cells, f'{direct:.2f}', f'{grown / 1e6:.0f} MB'])} |", one, each


def above(rows, which, bar):
    """The networks whose ratio is above a bar."""
    return "; ".join(name for name, (_, *ratios) in rows.items() if ratios[which] > bar) or "none"


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--queries", type=int, default=100)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--only", default="", help="a part of a setting's name")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for setting in SETTINGS:
        if arguments.only in setting.name:
            rows[setting.name] = measure(setting, arguments.queries, arguments.repeats)
            print(rows[setting.name][0], flush=True)
    verdicts = [
        f"One query costs more than {ONE} × plain training in: {above(rows, 0, ONE)}.",
        f"Each of {arguments.queries} costs more than {MANY} × plain training in: {above(rows, 1, MANY)}; "
        f"more than 1 × in: {above(rows, 1, 1)}.",
    ]
    many = f"each of {arguments.queries}"
    budget = f"{BUDGET / 1e6:.0f} MB"
    head = f"""Influence through training, in multiples of plain training (CPU seconds of all threads of the process,
median of {arguments.repeats}). The check runs training again once and comes before the first question. The last column
is by how much the process grew at most while it answered all {arguments.queries} queries under a budget of {budget}.

| network | a plain step | check | one query | {many} | direct, {many} | memory |
|---|---|---|---|---|---|---|"""
    lines = [line for line, _, _ in rows.values()]
    save("influence", "\n".join([head, *lines, "", *verdicts, "", f"Machine: {machine()}, 1 torch thread."]))


if __name__ == "__main__":
    main()
