"""One language model, trained on streams of text with what it remembers carried over, and judged on others."""

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import Tensor, nn

from dualform.models import SegmentLM, noam
from experiments.runs import console

from .settings import Settings
from .texts import Segment, read, segments

LAST = 100
"""Updates over which training accuracy is taken."""


class Judged(NamedTuple):
    """Sums over tokens: how many, their loss, and how many were right."""

    tokens: int = 0
    loss: float = 0.0
    right: int = 0

    def plus(self, logits: Tensor, y: Tensor, loss: float) -> "Judged":
        """With one more segment, whose mean loss is known."""
        right = int((logits.detach().argmax(-1) == y).sum())
        return Judged(self.tokens + y.numel(), self.loss + loss * y.numel(), self.right + right)

    def about(self) -> dict[str, float]:
        """Loss in nats and in bits, perplexity and accuracy of a token."""
        loss = self.loss / self.tokens
        return {
            "loss": loss, "bits": loss / math.log(2), "perplexity": math.exp(loss),
            "accuracy": self.right / self.tokens, "tokens": self.tokens,
        }  # fmt: skip


class Trainer:
    """A network with its optimiser and what it remembers."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.model, self.state, self.done = settings, make_model(settings), None, 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1.0)

    def update(self, segment: Segment) -> tuple[Tensor, float]:
        """One step on a segment: its logits, and its mean loss."""
        self.state, self.done = None if segment.again else self.state, self.done + 1
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.settings, self.done)
        logits, self.state = self.model(segment.x, self.state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), segment.y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return logits, loss.item()


def make_model(settings: Settings) -> SegmentLM:
    """An untrained network; with the seed of the settings always the same one."""
    torch.manual_seed(settings.seed)
    reach = {"reach": settings.memory + settings.segment} if settings.attention.startswith("relative") else {}
    return SegmentLM(
        len(read(settings.text).symbols), width=settings.width, heads=settings.heads, layers=settings.layers,
        hidden=settings.hidden, attention=settings.attention, memory=settings.memory, **reach, **settings.options,
    )  # fmt: skip


def rate(settings: Settings, update: int) -> float:
    """Noam's, with the peak of the settings at the end of the warm-up."""
    return noam(update, settings.width, settings.warmup, settings.peak * math.sqrt(settings.width * settings.warmup))


def training_ids(settings: Settings) -> Tensor:
    """The training text; for networks of other seeds it begins elsewhere, and goes round."""
    ids = read(settings.text).train
    return ids.roll(-settings.seed * (len(ids) // 10)) if settings.seed else ids


def training_segments(settings: Settings, updates: int) -> Iterator[Segment]:
    """What is trained on."""
    return segments(training_ids(settings), settings.batch, settings.segment, updates)


def train(settings: Settings) -> dict[str, Any]:
    """Train, and see how well. Nothing is selected: the losses are those of the last update."""
    trainer, recent, curve, times = Trainer(settings), Judged(), [], []
    some: list[float] = []
    work = training_segments(settings, settings.updates)
    for segment in track(work, "training", settings.updates, console=console, transient=True):
        begin = time.perf_counter()
        logits, loss = trainer.update(segment)
        times.append(time.perf_counter() - begin)
        some.append(loss)
        if trainer.done > settings.updates - LAST:
            recent = recent.plus(logits, segment.y, loss)
        if len(some) == 50 or trainer.done == settings.updates:
            curve.append(statistics.mean(some))
            some = []
    return {
        "valid": validated(trainer.model, settings),
        "train": recent.about(),
        "curve": curve,
        "median_seconds_of_an_update": statistics.median(times),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


@torch.no_grad()
def validated(model: SegmentLM, settings: Settings) -> dict[str, float]:
    """On a stretch of the validation text, in as many streams, with what is remembered carried over."""
    model.eval()
    ids = read(settings.text).valid[settings.valid_from : settings.valid_from + settings.validated + 1]
    steps = max(1, (len(ids) - 1) // settings.batch // settings.segment)
    state, found = None, Judged()
    for segment in segments(ids, settings.batch, settings.segment, steps):
        logits, state = model(segment.x, None if segment.again else state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), segment.y.flatten())
        found = found.plus(logits, segment.y, float(loss))
    model.train()
    return found.about()
