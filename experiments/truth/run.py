"""Which prediction of "what would change without it?" comes true? One experiment at a time:
``dualform reproduce truth/digits``.
"""

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.runs import Options, Run, console, each_run

from .judged import find_wrong_labels, flip, judge, judge_averages, leave_out_alone, train_without_subsets
from .problems import train_recorded
from .scores import peers_are_installed, score, score_by_peers, score_trivially
from .settings import (
    EXPERIMENTS,
    NETWORKS,
    ON_REQUEST,
    FlipSettings,
    RemovalSettings,
    Settings,
    WrongLabelSettings,
    tiny,
)

__all__ = ["EXPERIMENTS", "ON_REQUEST", "reproduce"]


def reproduce(experiment: str, options: Options) -> None:
    """Run an experiment; networks that already have a result are skipped."""
    torch.set_num_threads(1)  # trainings run side by side in processes
    if not peers_are_installed():
        console.print("The environments of the peers are missing, so their scores are left out: make truth")
    for run, settings in each_run("truth", experiment, options, EXPERIMENTS[experiment], NETWORKS, tiny):
        run.stages(stages(run, settings))
        if not options.keep:
            shutil.rmtree(run.folder / "trainings", ignore_errors=True)


def stages(run: Run, settings: Settings) -> dict[str, Callable[[], dict[str, Any]]]:
    """The stages of a run, by name."""
    found: dict[str, Callable[[], dict[str, Any]]] = {"training": partial(train_recorded, run, settings)}
    if isinstance(settings, FlipSettings):
        return found | {"flips": partial(flip, run, settings)}
    found |= {"ours": partial(score, run, settings), "trivial": partial(score_trivially, run, settings)}
    if peers_are_installed():
        found["peers"] = partial(score_by_peers, run, settings)
    if isinstance(settings, WrongLabelSettings):
        return found | {"found": partial(find_wrong_labels, run, settings)}
    assert isinstance(settings, RemovalSettings)
    found |= {"removals": partial(train_without_subsets, run, settings), "judged": partial(judge, run, settings)}
    if settings.seed == 0:
        found["alone"] = partial(leave_out_alone, run, settings)
    if settings.seed == NETWORKS - 1:
        found["averaged"] = partial(judge_averages, run, settings)
    return found
