"""Experiments after "RCMHA: Relative Convolutional Multi-Head Attention" (Sugiharto et al. 2023), one at a time:
``dualform reproduce rcmha/characters``.
"""

from dataclasses import replace
from functools import partial

import torch

from experiments.runs import Options, begin, console

from .copying import train_copying
from .costs import measure
from .recorded import ask, train_recorded
from .settings import EXPERIMENTS, NETWORKS, ON_REQUEST, ONCE, CopySettings, CostSettings, tiny
from .training import train

__all__ = ["EXPERIMENTS", "ON_REQUEST", "reproduce"]


def reproduce(experiment: str, options: Options) -> None:
    """Run an experiment: every network that has its result already is passed over."""
    if options.threads:
        torch.set_num_threads(options.threads)
    for seed in range(options.seeds or (1 if experiment in ONCE else NETWORKS)):
        for name in options.variants:
            variant = EXPERIMENTS[experiment][name]
            settings = replace(tiny(variant) if options.quick else variant, seed=seed)
            run = begin(options.out / "rcmha" / experiment / name / f"seed-{seed}", f"rcmha/{experiment}", settings)
            if isinstance(settings, CostSettings):
                run.stages({"costs": partial(measure, settings)})
            elif isinstance(settings, CopySettings):
                run.stages({"training": partial(train_copying, settings)})
            elif experiment == "recorded":
                run.stages({"training": partial(train_recorded, run, settings), "asked": partial(ask, run, settings)})
            else:
                run.stages({"training": partial(train, settings)})
            if not options.keep:
                run.forget_memory()
            console.print(f"{run.folder}: done")
