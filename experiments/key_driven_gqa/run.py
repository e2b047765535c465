"""Experiments after "Beyond Uniform Query Distribution: Key-Driven Grouped Query Attention" (Khan et al. 2024), one at
a time: ``dualform reproduce key-driven-gqa/fashion-mnist``.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.runs import Options, Run, begin, console

from .recorded import train_recorded
from .settings import EXPERIMENTS, NETWORKS, ON_REQUEST, ONCE, AnySettings, Recording, Start, Uptraining, tiny
from .training import checkpoint_in, train_on, train_start

__all__ = ["EXPERIMENTS", "ON_REQUEST", "reproduce"]


def reproduce(experiment: str, options: Options) -> None:
    """Run an experiment: every network that has its result already is passed over."""
    if options.threads:
        torch.set_num_threads(options.threads)
    for seed in range(options.seeds or (1 if experiment in ONCE else NETWORKS)):
        for name in options.variants:
            settings = seeded(EXPERIMENTS[experiment][name], seed, options.quick)
            if isinstance(settings, Start):
                trained(settings, options)
                continue
            folder = options.out / "key-driven-gqa" / experiment / name / f"seed-{seed}"
            run = begin(folder, f"key-driven-gqa/{experiment}", settings)
            if isinstance(settings, Recording):
                run.stages({"training": partial(train_recorded, run, settings)})
            else:
                run.stages({"training": partial(uptrain, run, settings, options)})
            if not options.keep:
                run.forget_memory()
            console.print(f"{run.folder}: done")


def uptrain(run: Run, settings: Uptraining, options: Options) -> dict[str, Any]:
    """Train on from the checkpoint, which may have to be trained first."""
    return train_on(run, settings, trained(settings.start, options))


def seeded(settings: AnySettings, seed: int, quick: bool) -> AnySettings:
    """Settings of one network: it begins with the checkpoint of its own seed."""
    settings = replace(tiny(settings) if quick else settings, seed=seed)
    return settings if isinstance(settings, Start) else replace(settings, start=replace(settings.start, seed=seed))


def trained(settings: Start, options: Options) -> Path:
    """The checkpoint of a network with multi-head attention; it is trained where it is missing."""
    folder = options.out / "key-driven-gqa" / "checkpoints" / settings.task / f"seed-{settings.seed}"
    run = begin(folder, "key-driven-gqa/checkpoints", settings)
    if not checkpoint_in(folder).exists():
        (folder / "training.json").unlink(missing_ok=True)
    run.stages({"training": partial(train_start, run, settings)})
    return checkpoint_in(folder)
