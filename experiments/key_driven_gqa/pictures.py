"""Images of each task as tensors around zero, and a network of matching shape."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dualform import data
from dualform.models import ViT

from .settings import Start


@dataclass(frozen=True)
class Task:
    """Images (n, channels, side, side) and classes, for training and testing."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@cache
def whole(name: str) -> Task:
    """All images of a task."""
    if name == "small-digits":  # cut in the order of the file
        images, labels = data.small_digits()
        x = (images.float() / 8 - 1).unsqueeze(1)
        return Task(x[:1437], labels[:1437], x[1437:], labels[1437:])
    parts = []
    for part in ("train", "test"):
        found = data.fashion_mnist(part) if name == "fashion-mnist" else data.cifar10(part, small=True)
        x = found.images.float() / 127.5 - 1
        parts += [x.unsqueeze(1) if x.ndim == 3 else x.movedim(-1, 1).contiguous(), found.labels]
    return Task(*parts)


def task(settings: Start) -> Task:
    """The images that the settings select."""
    found, most = whole(settings.task), settings.most
    if not most:
        return found
    return Task(found.x[:most], found.y[:most], found.test_x[: most // 3], found.test_y[: most // 3])


def make_vit(settings: Start, attention: str = "softmax", **options: Any) -> ViT:
    """An untrained network, determined by the seed of the settings."""
    torch.manual_seed(settings.seed)
    channels, side = whole(settings.task).x.shape[1:3]
    return ViT(
        side, settings.patch, channels=channels, classes=10, width=settings.width, heads=settings.heads,
        layers=settings.layers, ratio=settings.ratio, attention=attention, **options,
    )  # fmt: skip
