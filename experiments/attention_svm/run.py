"""Experiments E1 to E7 after "Transformers as Support Vector Machines" (Tarzanagh et al. 2023), one at a time:
``dualform reproduce attention-svm/local``.
"""

from functools import partial
from typing import Any

from experiments.runs import Options, each_run

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
    for run, settings in each_run("attention-svm", experiment, options, EXPERIMENTS[experiment], 1, tiny):
        if isinstance(settings, TrainedSettings):
            run.stages({
                "training": partial(trained.train, run, settings), "found": partial(trained.heads, run, settings),
            })  # fmt: skip
        else:
            run.stages({"found": partial(MEASURES[experiment], settings)})
