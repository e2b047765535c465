"""Experiments after "Beyond Uniform Query Distribution: Key-Driven Grouped Query Attention" (Khan et al. 2024), one at
a time: ``dualform reproduce key-driven-gqa/fashion-mnist``.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.runs import Options, Run, begin, each_run

from .recorded import train_recorded
from .settings import EXPERIMENTS, NETWORKS, ON_REQUEST, ONCE, AnySettings, Recording, Start, Uptraining, tiny
from .training import checkpoint_in, train_on, train_start

__all__ = ["EXPERIMENTS", "ON_REQUEST", "reproduce"]


def reproduce(experiment: str, options: Options) -> None:
    """Run an experiment; networks that already have a result are skipped."""
    networks = 1 if experiment in ONCE else NETWORKS
    variants = EXPERIMENTS[experiment]
    for run, settings in each_run("key-driven-gqa", experiment, options, variants, networks, tiny, seeded):
        if isinstance(settings, Start):
            trained(run, settings)
        elif isinstance(settings, Recording):
            run.stages({"training": partial(train_recorded, run, settings)})
        else:
            run.stages({"training": partial(uptrain, run, settings, options)})


def seeded(settings: AnySettings, seed: int) -> AnySettings:
    """Settings of one network, which starts from the checkpoint of its own seed."""
    settings = replace(settings, seed=seed)
    return settings if isinstance(settings, Start) else replace(settings, start=replace(settings.start, seed=seed))


def uptrain(run: Run, settings: Uptraining, options: Options) -> dict[str, Any]:
    """Convert a checkpoint and train it further; a missing checkpoint is trained first."""
    start = settings.start
    folder = options.out / "key-driven-gqa" / "checkpoints" / start.task / f"seed-{start.seed}"
    return train_on(run, settings, trained(begin(folder, "key-driven-gqa/checkpoints", start), start))


def trained(run: Run, settings: Start) -> Path:
    """The checkpoint of a network with multi-head attention, trained if it is missing."""
    checkpoint = checkpoint_in(run.folder)
    run.again_without("training", checkpoint)
    run.stages({"training": partial(train_start, run, settings)})
    return checkpoint
