"""Cost of an update at the shape of ViT-small: saved tensors, memory growth and time."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F

from dualform.models import ViT
from dualform.tuning import Tuned, VisualQueryTuning, trained_parameters
from experiments.measure import kept_bytes, peak_bytes, timed
from experiments.runs import console

from .methods import make
from .settings import CostSettings

WAYS = {name: 0 for name in ("linear", "intermediate", "prompts", "lora", "full")}
WAYS |= {"vqt-1": 1, "vqt-10": 10, "vqt-10, released": 10}
"""Methods and their numbers of query tokens; ``released`` runs queries and tokens as one sequence."""


def measure(settings: CostSettings) -> dict[str, Any]:
    """Saved megabytes, memory growth of a process, and interleaved forward and backward times of every method."""
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    x, y = torch.randn(settings.batch, 3, settings.size, settings.size), torch.arange(settings.batch) % settings.classes
    found: dict[str, Any] = {}
    for name, tokens in track(WAYS.items(), "measuring growth", console=console, transient=True):
        # first, and with networks built in separate processes: memory freed before would be reused
        make = partial(network, settings, name, tokens)
        found[name] = {"grown_megabytes": peak_bytes(lambda make=make: update(*make(), x, y)) / 1e6}
    for name, tokens in WAYS.items():
        model, call = network(settings, name, tokens)
        found[name] |= {
            "kept_megabytes": kept_bytes(model, lambda call=call: call(x)) / 1e6,
            "learned_parameters": sum(each.numel() for each in trained_parameters(model).values()),
        }
    steps = [Timed(*network(settings, name, tokens), x, y) for name, tokens in WAYS.items()]
    timed(steps, settings.turns)
    for name, step in zip(WAYS, steps, strict=True):
        found[name] |= {"forward_seconds": median(step.forward), "backward_seconds": median(step.backward)}
    return {"methods": found}


def network(settings: CostSettings, name: str, tokens: int) -> tuple[Tuned, Callable[[Tensor], Tensor]]:
    """An untrained network of a method, and the function that computes its logits."""
    shape = {"width": settings.width, "heads": settings.heads, "layers": settings.layers}
    torch.manual_seed(settings.seed)
    method, _, released = name.partition(", ")
    model = make(ViT(settings.size, settings.patch, classes=10, **shape), method, tokens, settings.classes).train()
    if released:
        assert isinstance(model, VisualQueryTuning)
        return model, lambda x: together(model, x)
    return model, model


def together(model: VisualQueryTuning, x: Tensor) -> Tensor:
    """The logits as in the released code: queries are prepended to the sequence and split off after each block."""
    h, blocks = model.backbone.embed(x), []
    for block, p in zip(model.backbone.blocks, model.queries, strict=True):
        inner: Any = block
        rows = torch.cat([p.expand(len(h), -1, -1), h], 1)
        normed = inner.norm1(rows)
        r = rows + inner.attn(normed, normed[:, len(p) :])
        made = r + inner.mlp(inner.norm2(r))
        blocks.append(made[:, : len(p)].flatten(1))
        h = made[:, len(p) :]
    found = [model.backbone.norm(h)[:, 0], *blocks]
    return model.head(torch.cat([F.normalize(each, dim=-1) for each in found], -1))


def update(model: Tuned, call: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Callable[[], None]:
    """Two updates with Adam; its state exists in the second."""
    optimizer = torch.optim.Adam(trained_parameters(model).values(), lr=1e-4)

    def once() -> None:
        for _ in range(2):
            F.cross_entropy(call(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return once


class Timed:
    """A forward and a backward pass, timed separately."""

    def __init__(self, model: Tuned, call: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        self.model, self.call, self.x, self.y = model, call, x, y
        self.forward: list[float] = []
        self.backward: list[float] = []

    def __call__(self) -> None:
        self.model.zero_grad()
        begin = time.perf_counter()
        loss = F.cross_entropy(self.call(self.x), self.y)
        middle = time.perf_counter()
        loss.backward()
        self.forward.append(middle - begin)
        self.backward.append(time.perf_counter() - middle)


def median(times: list[float]) -> float:
    """The median without the first turn, which is a warm-up."""
    return float(torch.tensor(times[1:]).median())
