"""Train perceptrons on images with a recorder."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dualform
from dualform import data
from dualform.models import MLP
from experiments.runs import Run, console

from .settings import ImageSettings


@dataclass(frozen=True)
class Pictures:
    """A data set as in the paper's code: bytes, scaled rows and classes, for training and test."""

    name: str
    bytes: Tensor
    x: Tensor
    y: Tensor
    test_bytes: Tensor
    test_x: Tensor
    test_y: Tensor


@cache
def pictures(name: str, small: bool = False) -> Pictures:
    """Read a data set."""
    read: Any = {"mnist": data.mnist, "fashion-mnist": data.fashion_mnist, "cifar10": data.cifar10}[name]
    options = {"small": small} if name == "cifar10" else {}
    scale = data.reference_scale(read("train", **options))
    train, test = read("train", split="reference", **options), read("test", **options)
    return Pictures(
        name, train.images, scale(train.images).flatten(1), train.labels, test.images, scale(test.images).flatten(1),
        test.labels,
    )  # fmt: skip


def all_training(settings: ImageSettings) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """Rows, classes and bytes of all training images, one set after the other, and the set of each."""
    sets = [pictures(name, settings.small) for name in settings.sets]
    names = [each.name for each in sets for _ in range(len(each.y))]
    return torch.cat([s.x for s in sets]), torch.cat([s.y for s in sets]), torch.cat([s.bytes for s in sets]), names


def make_model(settings: ImageSettings) -> MLP:
    """An untrained network, determined by the seed of the settings."""
    torch.manual_seed(settings.seed)
    return MLP(pictures(settings.sets[0], settings.small).x.shape[1], *settings.widths, 10)


def train(run: Run, settings: ImageSettings) -> dict[str, Any]:
    """Train as in the paper with a recorder, and save the weights after every phase."""
    model = make_model(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate, momentum=settings.momentum)
    x, y, _, names = all_training(settings)
    clipped, last, accuracy = 0, 1, []

    def phase_ends(number: int) -> None:
        accuracy.append({name: right(model, name, settings) for name in settings.sets})
        save_file(model.state_dict(), checkpoint(run, number))

    with dualform.record(model, optimizer, run.memory, dtype=settings.dtype, overwrite=True, progress=False) as tape:
        for phase, index in track(batches(settings), "training", settings.updates, console=console, transient=True):
            if phase != last:
                phase_ends(last)
                last = phase
            source = [names[i] for i in index.tolist()]
            group = [f"{name} {label}" for name, label in zip(source, y[index].tolist(), strict=True)]
            tape.note(index=index, label=y[index], source=source, group=group, phase=phase)
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip or float("inf"))
            clipped += settings.clip is not None and float(norm) > settings.clip
            optimizer.step()
            optimizer.zero_grad()
    phase_ends(last)
    certificate = dualform.open(run.memory).certificate
    return {"accuracy": accuracy, "clipped": clipped / settings.updates, "certificate": certificate.worst}


def checkpoint(run: Run, phase: int) -> Path:
    """File of the weights after a phase."""
    return run.folder / f"after-{phase}.safetensors"


def trained(run: Run, settings: ImageSettings, phase: int | None = None) -> MLP:
    """The network after a phase, by default the last."""
    model = make_model(settings)
    model.load_state_dict(load_file(checkpoint(run, phase or len(settings.phases))))
    return model


def batches(settings: ImageSettings) -> Iterator[tuple[int, Tensor]]:
    """Phase and image indices of each update: epochs over the phase's images, shuffled anew each time."""
    random = torch.Generator().manual_seed(1000 + settings.seed)
    first, places = 0, {}
    for name in settings.sets:
        count = len(pictures(name, settings.small).y)
        places[name] = torch.arange(first, first + count)
        first += count
    for number, phase in enumerate(settings.phases, start=1):
        mine, left = torch.cat([places[name] for name in phase.sets]), torch.zeros(0, dtype=torch.int64)
        for _ in range(phase.updates):
            if len(left) < settings.batch:
                left = mine[torch.randperm(len(mine), generator=random)]
            index, left = left[: settings.batch], left[settings.batch :]
            yield number, index


def right(model: nn.Module, name: str, settings: ImageSettings) -> float:
    """Test accuracy."""
    images = pictures(name, settings.small)
    with torch.no_grad():
        return float((model(images.test_x).argmax(1) == images.test_y).double().mean())
