"""Cost of an update with each attention: time, memory kept for the backward pass, growth of the process."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from experiments.measure import kept_bytes, peak_bytes, timed
from experiments.runs import console

from .settings import EXPERIMENTS, CostSettings, Settings, tiny
from .texts import Segment, read
from .training import Trainer, training_segments


def measure(settings: CostSettings) -> dict[str, Any]:
    """By experiment and variant: milliseconds per update, megabytes kept, and megabytes the process grows by."""
    torch.set_num_threads(1)
    names = track(settings.experiments, "timing", console=console, transient=True)
    return {name: of_experiment(name, settings) for name in names}


def of_experiment(name: str, settings: CostSettings) -> dict[str, Any]:
    """Measure all variants on the same segment with a full memory."""
    variants = {key: tiny(each) if settings.quick else each for key, each in EXPERIMENTS[name].items()}
    works, kept, parameters = [], [], []
    some = [each for each in variants.values() if isinstance(each, Settings)]
    read(some[0].text)  # otherwise the growth of the measuring process would include the text
    grown = [peak_bytes(lambda each=each: first_update(each)) / 1e6 for each in some]
    for each in some:
        trainer, segment = with_full_memory(each)
        kept.append(kept_bytes(trainer.model, lambda t=trainer, s=segment: loss_of(t, s)) / 1e6)
        parameters.append(sum(p.numel() for p in trainer.model.parameters()))
        works.append(lambda t=trainer, s=segment: again(t, s))
    times = timed(works, settings.turns)
    return {
        key: {"milliseconds": 1e3 * statistics.median(took), "kept_megabytes": k, "grown_megabytes": g, "parameters": p}
        for key, took, k, g, p in zip(variants, times, kept, grown, parameters, strict=True)
    }  # fmt: skip


def with_full_memory(settings: Settings) -> tuple[Trainer, Segment]:
    """A network whose memory is full, and the next segment."""
    trainer, steps = Trainer(settings), -(-settings.memory // settings.segment) + 1
    *first, last = training_segments(settings, steps)
    with torch.no_grad():
        for segment in first:
            _, trainer.state = trainer.model(segment.x, trainer.state)
    return trainer, last._replace(again=False)


def again(trainer: Trainer, segment: Segment) -> None:
    """Run one update and restore the memory from before it."""
    before = trainer.state
    trainer.update(segment)
    trainer.state = before


def first_update(settings: Settings) -> Callable[[], None]:
    """The first update of a new network with a full memory of zeros, so that the optimiser's state is counted."""
    trainer, (segment,) = Trainer(settings), training_segments(settings, 1)
    shape = (settings.batch, settings.memory, settings.width)
    trainer.state = tuple(torch.zeros(shape) for _ in range(settings.layers)) if settings.memory else None
    return lambda: again(trainer, segment._replace(again=False))


def loss_of(trainer: Trainer, segment: Segment) -> Tensor:
    """The loss of a segment."""
    logits, _ = trainer.model(segment.x, trainer.state)
    return nn.functional.cross_entropy(logits.flatten(0, 1), segment.y.flatten())
