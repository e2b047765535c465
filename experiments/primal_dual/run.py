"""Experiments after "A Primal-Dual Framework for Transformers and Neural Networks" (Nguyen et al. 2023), one at a time:
``dualform reproduce primal-dual/japanese-vowels``.
"""

from functools import partial

from experiments.runs import Options, each_run

from .efficiency import CostSettings, measure
from .recorded import ask, train_recorded
from .settings import EXPERIMENTS, NETWORKS, ON_REQUEST, ONCE, tiny
from .training import train
from .updates import UpdateSettings, measure_updates

__all__ = ["EXPERIMENTS", "ON_REQUEST", "reproduce"]


def reproduce(experiment: str, options: Options) -> None:
    """Run an experiment; networks that already have a result are skipped."""
    networks = 1 if experiment in ONCE else NETWORKS
    for run, settings in each_run("primal-dual", experiment, options, EXPERIMENTS[experiment], networks, tiny):
        if isinstance(settings, CostSettings):
            run.stages({"grid": partial(measure, run, settings)})
        elif isinstance(settings, UpdateSettings):
            run.stages({"updates": partial(measure_updates, settings)})
        elif experiment == "recorded":
            run.stages({"training": partial(train_recorded, run, settings), "asked": partial(ask, run, settings)})
        else:
            run.stages({"training": partial(train, settings)})
