"""Tuning: choose the rate on validation images, train on all labelled images, evaluate once on the test set."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.models import ViT
from dualform.tuning import group_lasso, trained_parameters, warmup_cosine

from . import methods
from .methods import Way
from .pictures import Pictures, labelled, pictures
from .settings import TransferSettings

BLOCK = 100


def batches(count: int, size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Image indices of each update, reshuffled every epoch."""
    random = torch.Generator().manual_seed(1000 + seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=random).split(size)


@torch.no_grad()
def accuracy(model: nn.Module, part: Pictures) -> float:
    """The share of images that a network classifies correctly."""
    model.eval()
    right = sum(
        int((model(part.x[i : i + BLOCK]).argmax(1) == part.y[i : i + BLOCK]).sum())
        for i in range(0, len(part.y), BLOCK)
    )
    return right / len(part.y)


Rate = tuple[float, float]
"""Learning rates of the head and query tokens, and of trained parameters inside the backbone."""


def fit(way: Way, part: Pictures, rate: Rate, settings: TransferSettings, lasso: float = 0.0) -> None:
    """Adam without decay or augmentation; the rate warms up over a tenth of the epochs, then falls as half a cosine."""
    way.model.eval()
    with torch.no_grad():
        once = torch.cat([way.once(part.x[i : i + BLOCK]) for i in range(0, len(part.y), BLOCK)])
    optimizer = torch.optim.Adam(groups(way.model, rate))
    way.model.train()
    warmup = max(1, settings.epochs // 10)
    for epoch in range(settings.epochs):
        for group in optimizer.param_groups:  # the factor of the next epoch, since that of the first is 0
            group["lr"] = group["peak"] * warmup_cosine(epoch + 1, settings.epochs + 1, warmup)
        for index in batches(len(part.y), settings.batch, 1, 100 * settings.seed + epoch):
            loss = F.cross_entropy(way.logits(once[index]), part.y[index])
            if lasso:
                loss = loss + lasso * group_lasso(way.model.head.weight)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def groups(model: nn.Module, rate: Rate) -> list[dict[str, Any]]:
    """Parameter groups with their rates: outside the backbone and, if any are trained, inside."""
    trained = trained_parameters(model)
    parts = ([p for name, p in trained.items() if name.startswith("backbone.") == inside] for inside in (False, True))
    return [{"params": part, "lr": peak, "peak": peak} for part, peak in zip(parts, rate, strict=True) if part]


def tuned(backbone: ViT, part: Pictures, rate: Rate, settings: TransferSettings) -> Way:
    """Run all stages of a method: train; to select features, train a head with a group lasso, then one without."""
    way = methods.way(backbone, settings)
    if settings.keep == 1:
        fit(way, part, rate, settings)
        return way
    if settings.tokens:
        fit(way, part, rate, settings)
    squeezed, half = methods.reading(way.model.refit()), (rate[0] / 2, rate[1] / 2)
    fit(squeezed, part, half, settings, settings.lasso)
    chosen = methods.selected(way, squeezed.model.head.weight, settings)
    fit(chosen, part, half, settings)
    return chosen


def chosen_rate(backbone: ViT, settings: TransferSettings) -> tuple[Rate, list[float]]:
    """The rate with the best validation accuracy (of equals the smallest), and the accuracies of all rates."""
    part, _ = labelled(settings.target, settings.labelled, settings.seed)
    train, valid = part[settings.validation :], part[: settings.validation]
    trial = replace(settings, epochs=settings.trial_epochs)
    found = [accuracy(tuned(backbone, train, rate, trial).model, valid) for rate in settings.rates]
    best = max(zip(found, settings.rates, strict=True), key=lambda pair: (pair[0], -pair[1][0], -pair[1][1]))
    return best[1], found


def transfer(backbone: ViT, settings: TransferSettings, rate: Rate | None = None) -> dict[str, Any]:
    """Tune on all labelled images, and evaluate once on the test images. Without a rate, choose it first."""
    found: list[float] = []
    if rate is None:
        rate, found = chosen_rate(backbone, settings)
    begin = time.perf_counter()
    part, _ = labelled(settings.target, settings.labelled, settings.seed)
    model = tuned(backbone, part, rate, settings).model
    took, test = time.perf_counter() - begin, pictures(settings.target, "test")
    test = test[: settings.tests] if settings.tests else test
    return {
        "accuracy": accuracy(model, test),
        "train_accuracy": accuracy(model, part),
        "rate": rate,
        "validation": found,
        "learned_parameters": learned(model),
        "features": model.head.in_features,
        "training_seconds": took,
        "tested_on": len(test.y),
    }


def learned(model: nn.Module) -> int:
    """The number of parameters trained in any stage, including query tokens that are frozen in the last stage."""
    found = dict(trained_parameters(model))
    queries = getattr(model, "queries", None)
    return sum(each.numel() for each in ({**found, "queries": queries} if queries is not None else found).values())
