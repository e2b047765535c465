"""Cost of an update of each network: its time, with networks interleaved, and the memory saved for backward."""

import statistics
from typing import Any

import torch
from rich.progress import track

from experiments.measure import kept_bytes, timed
from experiments.runs import console

from .examples import make_model, task
from .settings import EXPERIMENTS, UpdateSettings, tiny
from .training import batches, make_optimizer, update


def measure_updates(settings: UpdateSettings) -> dict[str, Any]:
    """Median milliseconds of an update and megabytes saved for its backward pass, by task and attention."""
    torch.set_num_threads(1)
    return {name: of_task(name, settings) for name in track(settings.tasks, "timing", console=console, transient=True)}


def of_task(name: str, settings: UpdateSettings) -> dict[str, Any]:
    """Costs of all attentions on one task, on the same batch."""
    variants = {variant: tiny(each) if settings.quick else each for variant, each in EXPERIMENTS[name].items()}
    works, megabytes = [], []
    for each in variants.values():
        given, model = task(each), make_model(each)
        part, optimizer = given.train[next(batches(each, given, 1))], make_optimizer(each, model)
        megabytes.append(kept_bytes(model, lambda model=model, part=part: model(*part.inputs)) / 1e6)
        works.append(
            lambda each=each, model=model, optimizer=optimizer, part=part: update(each, model, optimizer, part)
        )
    times = timed(works, settings.turns)
    return {
        variant: {"milliseconds": 1e3 * statistics.median(took), "megabytes": kept}
        for variant, took, kept in zip(variants, times, megabytes, strict=True)
    }
