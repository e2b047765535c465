"""Training of multi-head networks from scratch, and uptraining after conversion to another attention."""

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dualform import attention, plot
from dualform.attention import Allocating, Allocations, DynamicAttention
from dualform.models import ViT, convert
from experiments.measure import kept_bytes
from experiments.runs import Run

from .pictures import Task, make_vit, task
from .settings import Start, Uptraining
from .similarity import similarity

AT_ONCE, KEPT = 250, 50
"""Batch size in testing, in the order of the data set; and number of stored passes of a history, evenly spaced."""


def train_start(run: Run, settings: Start) -> dict[str, Any]:
    """Train a network with multi-head attention, and save it in the run folder."""
    given, model = task(settings), make_vit(settings)
    times = list(updates(settings, model, given, settings.updates, settings.seed, warm=min(100, settings.updates // 2)))
    save_file(model.state_dict(), checkpoint_in(run.folder))
    return {
        "accuracy": accuracy(model, given),
        "updates": settings.updates,
        "passes": settings.updates * settings.batch / len(given.y),
        "parameters": parameters(model),
        "tested_on": len(given.test_y),
        "median_seconds_of_an_update": statistics.median(times),
    }


def checkpoint_in(folder: Path) -> Path:
    """The file with the trained weights of a run."""
    return folder / "model.safetensors"


def train_on(run: Run, settings: Uptraining, checkpoint: Path) -> dict[str, Any]:
    """Convert a trained network, test it and train it further; record and draw its allocations."""
    start = settings.start
    given, model = task(start), make_vit(start)
    model.load_state_dict(load_file(checkpoint))
    if settings.attention != "softmax":
        model = convert(model, settings.attention, **settings.options)
    torch.manual_seed(1000 + settings.seed)  # noise, and repairs at random
    before, ends = accuracy(model, given), set(settings.points)
    points, times = {"0": before}, []
    with watched(model) as history:
        # the same pictures in the same order for all variants of a seed, other ones than the checkpoint began with
        for t, seconds in enumerate(updates(start, model, given, max(ends), 500 + settings.seed), start=1):
            times.append(seconds)
            if t in ends:
                points[str(t)] = accuracy(model, given)
    found = {
        "accuracy": points[str(max(ends))],
        "converted": before,
        "points": points,
        "parameters": parameters(model),
        "key_value_heads": int(settings.options.get("groups", start.heads)),
        "kept_megabytes": kept(model, given.x[: start.batch]) / 1e6,
        "median_seconds_of_an_update": statistics.median(times),
        "similarity": similarity(model, given.test_x[:64]),
    }
    if history is not None:
        found["allocations"] = {layer: summary(history, layer) for layer in history.layers}
        plot.allocations(history).savefig(run.figures / "allocations.png", dpi=110)
    return found


def watched(model: nn.Module) -> AbstractContextManager[Allocations | None]:
    """A context that records the allocations of a model, if it has any."""
    with_some = any(isinstance(each, Allocating) for each in model.modules())
    return attention.allocations(model) if with_some else nullcontext()


def summary(history: Allocations, layer: str) -> dict[str, Any]:
    """A summary of a history: some passes, the share of unused heads, the number of changes."""
    heads = history[layer]
    some = torch.linspace(0, len(heads) - 1, min(KEPT, len(heads))).round().long()
    return {
        "passes": some.tolist(),
        "heads": [[round(value, 3) for value in line] for line in heads[some].tolist()],
        "unused": [round(value, 4) for value in history.unused(layer).mean(0).tolist()],
        "changes": history.changes(layer),
    }


def updates(settings: Start, model: ViT, given: Task, count: int, seed: int, warm: int = 0) -> Iterator[float]:
    """Make ``count`` updates; yield the seconds of each. The rate rises over the first ``warm``, then is constant."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=settings.decay)
    for t, index in enumerate(batches(settings, model, len(given.y), count, seed)):
        model.train()
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * (min(1.0, (t + 1) / warm) if warm else 1.0)
        nn.functional.cross_entropy(model(given.x[index]), given.y[index]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        model.eval()
        yield seconds


def batches(settings: Start, model: nn.Module, length: int, count: int, seed: int) -> Iterator[Tensor]:
    """Image indices of each update, reshuffled every epoch. Dynamic layers are told when an epoch begins."""
    random = torch.Generator().manual_seed(seed)
    while True:
        for layer in (each for each in model.modules() if isinstance(each, DynamicAttention)):
            layer.begin_epoch()
        for index in torch.randperm(length, generator=random).split(settings.batch):
            if count == 0:
                return
            count -= 1
            yield index


@torch.no_grad()
def accuracy(model: ViT, given: Task) -> float:
    """The share of all test images that a network classifies correctly."""
    model.eval()
    said = torch.cat([model(x).argmax(1) for x in given.test_x.split(AT_ONCE)])
    return float((said == given.test_y).double().mean())


def parameters(model: nn.Module) -> int:
    """The number of parameters."""
    return sum(p.numel() for p in model.parameters())


def kept(model: ViT, x: Tensor) -> int:
    """Bytes that an update saves for the backward pass, measured without changing buffers such as pass counts."""
    before = {name: each.clone() for name, each in model.named_buffers()}
    model.train()
    found = kept_bytes(model, lambda: model(x))
    for name, each in model.named_buffers():
        each.copy_(before[name])
    model.eval()
    return found
