"""Experiments after "A Primal-Dual Framework for Transformers and Neural Networks" (Nguyen et al. 2023), one at a time:
``dualform reproduce primal-dual/japanese-vowels``.
"""

from dataclasses import replace
from functools import partial

import torch

from experiments.runs import Options, begin, console

from .efficiency import CostSettings, measure
from .recorded import ask, train_recorded
from .settings import EXPERIMENTS, NETWORKS, ON_REQUEST, ONCE, tiny
from .training import train
from .updates import UpdateSettings, measure_updates

__all__ = ["EXPERIMENTS", "ON_REQUEST", "reproduce"]


def reproduce(experiment: str, options: Options) -> None:
    """Run an experiment: every network that has its result already is passed over."""
    if options.threads:
        torch.set_num_threads(options.threads)
    for seed in range(options.seeds or (1 if experiment in ONCE else NETWORKS)):
        for name in options.variants:
            variant = EXPERIMENTS[experiment][name]
            settings = replace(tiny(variant) if options.quick else variant, seed=seed)
            run = begin(
                options.out / "primal-dual" / experiment / name / f"seed-{seed}", f"primal-dual/{experiment}", settings
            )
            if isinstance(settings, CostSettings):
                run.stages({"grid": partial(measure, run, settings)})
            elif isinstance(settings, UpdateSettings):
                run.stages({"updates": partial(measure_updates, settings)})
            elif experiment == "recorded":
                run.stages({"training": partial(train_recorded, run, settings), "asked": partial(ask, run, settings)})
            else:
                run.stages({"training": partial(train, settings)})
            if not options.keep:
                run.forget_memory()
            console.print(f"{run.folder}: done")
