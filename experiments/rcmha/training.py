"""Train a language model on streams of text with a memory carried from segment to segment, and validate it."""

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
"""Number of final updates over which training figures are averaged."""


class Judged(NamedTuple):
    """Sums over tokens: their number, loss, and number predicted correctly."""

    tokens: int = 0
    loss: float = 0.0
    right: int = 0

    def plus(self, logits: Tensor, y: Tensor, loss: float) -> "Judged":
        """The sums with one more segment, given its mean loss."""
        right = int((logits.detach().argmax(-1) == y).sum())
        return Judged(self.tokens + y.numel(), self.loss + loss * y.numel(), self.right + right)

    def about(self) -> dict[str, float]:
        """Mean loss in nats and in bits, perplexity and accuracy."""
        loss = self.loss / self.tokens
        return {
            "loss": loss, "bits": loss / math.log(2), "perplexity": math.exp(loss),
            "accuracy": self.right / self.tokens, "tokens": self.tokens,
        }  # fmt: skip


class Trainer:
    """A network with its optimiser and its memory of earlier segments."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.model, self.state, self.done = settings, make_model(settings), None, 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1.0)

    def update(self, segment: Segment) -> tuple[Tensor, float]:
        """Take one step on a segment; return its logits and mean loss."""
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
    """An untrained network, determined by the seed of the settings."""
    torch.manual_seed(settings.seed)
    reach = {"reach": settings.memory + settings.segment} if settings.attention.startswith("relative") else {}
    return SegmentLM(
        len(read(settings.text).symbols), width=settings.width, heads=settings.heads, layers=settings.layers,
        hidden=settings.hidden, attention=settings.attention, memory=settings.memory, **reach, **settings.options,
    )  # fmt: skip


def rate(settings: Settings, update: int) -> float:
    """Learning rate of the Noam schedule, which peaks at the end of the warm-up."""
    return noam(update, settings.width, settings.warmup, settings.peak * math.sqrt(settings.width * settings.warmup))


def training_ids(settings: Settings) -> Tensor:
    """The training text, rotated to a different start for each seed."""
    ids = read(settings.text).train
    return ids.roll(-settings.seed * (len(ids) // 10)) if settings.seed else ids


def training_segments(settings: Settings, updates: int) -> Iterator[Segment]:
    """The training segments of the given number of updates."""
    return segments(training_ids(settings), settings.batch, settings.segment, updates)


def train(settings: Settings) -> dict[str, Any]:
    """Train and validate. Nothing is selected: validation follows the last update."""
    trainer, recent, curve, times = Trainer(settings), Judged(), [], []
    losses: list[float] = []
    work = training_segments(settings, settings.updates)
    for segment in track(work, "training", settings.updates, console=console, transient=True):
        begin = time.perf_counter()
        logits, loss = trainer.update(segment)
        times.append(time.perf_counter() - begin)
        losses.append(loss)
        if trainer.done > settings.updates - LAST:
            recent = recent.plus(logits, segment.y, loss)
        if len(losses) == 50 or trainer.done == settings.updates:
            curve.append(statistics.mean(losses))
            losses = []
    return {
        "valid": validated(trainer.model, settings),
        "train": recent.about(),
        "curve": curve,
        "median_seconds_of_an_update": statistics.median(times),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


@torch.no_grad()
def validated(model: SegmentLM, settings: Settings) -> dict[str, float]:
    """Validate on a stretch of the validation text, in as many streams as in training, with the memory carried over."""
    model.eval()
    ids = read(settings.text).valid[settings.valid_from : settings.valid_from + settings.validated + 1]
    steps = max(1, (len(ids) - 1) // settings.batch // settings.segment)
    state, totals = None, Judged()
    for segment in segments(ids, settings.batch, settings.segment, steps):
        logits, state = model(segment.x, None if segment.again else state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), segment.y.flatten())
        totals = totals.plus(logits, segment.y, float(loss))
    model.train()
    return totals.about()
