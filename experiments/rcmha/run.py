"""Experiments after "RCMHA: Relative Convolutional Multi-Head Attention" (Sugiharto et al. 2023), one at a time:
``dualform reproduce rcmha/characters``.
"""

from functools import partial

from experiments.runs import Options, each_run

from .copying import train_copying
from .costs import measure
from .counts import counted
from .recorded import ask, train_recorded
from .settings import EXPERIMENTS, NETWORKS, ON_REQUEST, ONCE, CopySettings, CostSettings, CountSettings, tiny
from .training import train

__all__ = ["EXPERIMENTS", "ON_REQUEST", "reproduce"]


def reproduce(experiment: str, options: Options) -> None:
    """Run an experiment: networks that already have a result are skipped."""
    networks = 1 if experiment in ONCE else NETWORKS
    for run, settings in each_run("rcmha", experiment, options, EXPERIMENTS[experiment], networks, tiny):
        if isinstance(settings, CostSettings):
            run.stages({"costs": partial(measure, settings)})
        elif isinstance(settings, CountSettings):
            run.stages({"counts": partial(counted, settings)})
        elif isinstance(settings, CopySettings):
            run.stages({"training": partial(train_copying, settings)})
        elif experiment == "recorded":
            run.stages({"training": partial(train_recorded, run, settings), "asked": partial(ask, run, settings)})
        else:
            run.stages({"training": partial(train, settings)})
