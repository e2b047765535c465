"""Experiments E1 to E7 after "Transformers as Support Vector Machines" (Tarzanagh et al. 2023), one at a time:
``dualform reproduce attention-svm/local``.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from experiments.runs import Options, begin, console

from . import local, nonlinear, outcomes, paths, quadratic, ranks, trained
from .settings import EXPERIMENTS, ON_REQUEST, TrainedSettings, tiny

__all__ = ["EXPERIMENTS", "ON_REQUEST", "reproduce"]

MEASURES: dict[str, Any] = {
    "paths": paths.measure,
    "local": local.measure,
    "outcomes": outcomes.measure,
    "ranks": ranks.measure,
    "nonlinear": nonlinear.measure,
    "quadratic": quadratic.measure,
}
"""What each experiment does with its settings; each has one stage, "found". Transformers are recorded first."""


def reproduce(experiment: str, options: Options) -> None:
    """Run an experiment: every variant that has its result already is passed over."""
    if options.threads:
        torch.set_num_threads(options.threads)
    for seed in range(options.seeds or 1):
        for name in options.variants:
            variant = EXPERIMENTS[experiment][name]
            settings = replace(tiny(variant) if options.quick else variant, seed=seed)
            folder = options.out / "attention-svm" / experiment / name / f"seed-{seed}"
            run = begin(folder, f"attention-svm/{experiment}", settings)
            if isinstance(settings, TrainedSettings):
                run.stages({
                    "training": partial(trained.train, run, settings), "found": partial(trained.heads, run, settings),
                })  # fmt: skip
                if not options.keep:
                    run.forget_memory()
            else:
                run.stages({"found": partial(MEASURES[experiment], settings)})
            console.print(f"{run.folder}: done")
