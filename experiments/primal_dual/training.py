"""Training of one network."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from experiments.runs import console

from .examples import Part, Task, make_model, task
from .redundancy import head_distances
from .settings import Settings

LOOKED_AT = 64
"""Number of test examples on which heads are compared."""


def train(settings: Settings) -> dict[str, Any]:
    """Train and evaluate. No checkpoint is selected: the accuracy is that after the last update."""
    given, model = task(settings), make_model(settings)
    optimizer = make_optimizer(settings, model)
    updates = number_of_updates(settings, given)
    losses, times = [], []
    for index in track(batches(settings, given, updates), "training", updates, console=console, transient=True):
        begin = time.perf_counter()
        losses.append(update(settings, model, optimizer, given.train[index]))
        times.append(time.perf_counter() - begin)
    model.eval()
    return {
        "accuracy": accuracy(model, given.test),
        "train_accuracy": accuracy(model, given.train[: len(given.test)]),
        "loss": statistics.mean(losses[-20:]),
        "first_loss": statistics.mean(losses[:20]),
        "updates": updates,
        "median_seconds_of_an_update": statistics.median(times),
        "parameters": sum(p.numel() for p in model.parameters()),
        "heads": head_distances(model, given.test[:LOOKED_AT].inputs),
    }


def make_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of the settings."""
    kind = {"RAdam": torch.optim.RAdam, "AdamW": torch.optim.AdamW}[settings.optimiser]
    return kind(model.parameters(), lr=settings.learning_rate, weight_decay=settings.decay)


def update(settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, part: Part) -> float:
    """One step on a batch."""
    loss = nn.functional.cross_entropy(model(*part.inputs), part.y)
    loss.backward()
    if settings.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def number_of_updates(settings: Settings, given: Task) -> int:
    """The number of updates of a training."""
    return settings.updates or settings.epochs * -(-len(given.train) // settings.batch)


def batches(settings: Settings, given: Task, updates: int) -> Iterator[Tensor]:
    """Example indices of each update, reshuffled every epoch."""
    random = torch.Generator().manual_seed(1000 + settings.seed)
    while True:
        for index in torch.randperm(len(given.train), generator=random).split(settings.batch):
            if updates == 0:
                return
            updates -= 1
            yield index


@torch.no_grad()
def accuracy(model: nn.Module, part: Part) -> float:
    """The share of examples that a network classifies correctly."""
    right = 0
    for first in range(0, len(part), 100):
        batch = part[first : first + 100]
        right += int((model(*batch.inputs).argmax(1) == batch.y).sum())
    return right / len(part)
