"""The examples of each task as tensors, and a network of matching shape."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from dualform import data
from dualform.models import SeriesClassifier, TextClassifier

from .settings import SERIES, Settings
from .tasks import listops, needle


@dataclass(frozen=True)
class Part:
    """Inputs, their padding masks, and classes."""

    x: Tensor
    padding: Tensor | None
    y: Tensor

    def __getitem__(self, which: Tensor | slice) -> "Part":
        padding = None if self.padding is None else self.padding[which]
        return Part(self.x[which], padding, self.y[which])

    def __len__(self) -> int:
        return len(self.y)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The arguments of the network's forward pass."""
        return (self.x,) if self.padding is None else (self.x, self.padding)


@dataclass(frozen=True)
class Task:
    """Training and test examples; ``tokens`` is the size of a vocabulary, 0 for series."""

    train: Part
    test: Part
    classes: int
    tokens: int = 0


def task(settings: Settings) -> Task:
    """The task that the settings select."""
    whole = _task(settings.task, settings.length, settings.most)
    if not settings.most:
        return whole
    return Task(whole.train[: settings.most], whole.test[: max(settings.most // 3, 4)], whole.classes, whole.tokens)


@cache
def _task(name: str, length: int, most: int) -> Task:
    if name in SERIES:
        train, test = data.standardised(*(data.series(SERIES[name][0], part) for part in ("train", "test")))
        parts = [
            Part(each.values, each.padding if bool(each.padding.any()) else None, each.labels) for each in (train, test)
        ]
        return Task(parts[0], parts[1], len(train.classes))
    if name == "small-digits":  # cut in the order of the file
        images, labels = data.small_digits()
        x = (images.float() / 8 - 1).flatten(1).unsqueeze(-1)
        return Task(Part(x[:1437], None, labels[:1437]), Part(x[1437:], None, labels[1437:]), 10)
    if name == "needle":
        parts = [needle(count, seed=seed) for count, seed in ((2048, 0), (512, 1))]
        return Task(*(Part(each.values, None, each.labels) for each in parts), 4)  # pyright: ignore
    if name == "listops":
        trees = listops(most + 2000, max_length=length)
        whole = Part(trees.tokens, trees.padding, trees.labels)
        return Task(whole[2000:], whole[:2000], 10, 16)
    parts = []
    for part in ("train", "test"):
        texts, labels = data.reviews(part)
        tokens, padding = data.as_bytes(texts, length)
        parts.append(Part(tokens, padding if bool(padding.any()) else None, labels))
    return Task(parts[0], parts[1], 2, 257)


def make_model(settings: Settings) -> nn.Module:
    """An untrained network, determined by the seed of the settings."""
    given = task(settings)
    torch.manual_seed(settings.seed)
    length = max(given.train.x.shape[1], given.test.x.shape[1])
    kind, first = (TextClassifier, given.tokens) if given.tokens else (SeriesClassifier, given.train.x.shape[2])
    return kind(
        first, length, given.classes, width=settings.width, heads=settings.heads, layers=settings.layers,
        hidden=settings.hidden, attention=settings.attention, dropout=settings.dropout, **settings.options,
    )  # fmt: skip
