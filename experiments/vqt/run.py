"""Experiments after "Visual Query Tuning" (Tu, Mai, Chao 2023), one at a time: ``dualform reproduce vqt/mnist``."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dualform.models import ViT
from experiments.runs import Options, Run, each_run

from . import backbone
from .cost import measure
from .recorded import ask, train_recorded
from .settings import (
    EXPERIMENTS,
    NETWORKS,
    ON_REQUEST,
    ONCE,
    SOURCE,
    BackboneSettings,
    CostSettings,
    tiny,
)
from .training import Rate, transfer

__all__ = ["EXPERIMENTS", "ON_REQUEST", "reproduce"]


def reproduce(experiment: str, options: Options) -> None:
    """Run an experiment; networks that already have a result are skipped."""
    networks = 1 if experiment in ONCE else NETWORKS
    for run, settings in each_run("vqt", experiment, options, EXPERIMENTS[experiment], networks, tiny):
        run.stages(stages(experiment, run, settings, options))


def stages(experiment: str, run: Run, settings: Any, options: Options) -> dict[str, Callable[[], dict[str, Any]]]:
    """The stages of a run, by name."""
    if isinstance(settings, BackboneSettings):
        run.again_without("training", run.folder / backbone.FILE)
        return {"training": partial(backbone.train_backbone, run, settings)}
    if isinstance(settings, CostSettings):
        return {"cost": partial(measure, settings)}
    if experiment == "recorded":
        return {
            "training": lambda: train_recorded(run, trained_backbone(options), settings),
            "asked": lambda: ask(run, trained_backbone(options), settings),
        }
    rate = first_rate(run.folder.parent) if settings.seed else None
    return {"training": lambda: transfer(trained_backbone(options), settings, rate)}


def trained_backbone(options: Options) -> ViT:
    """The trained backbone that all experiments share."""
    settings = EXPERIMENTS["backbone"][SOURCE]
    settings = tiny(settings) if options.quick else settings
    assert isinstance(settings, BackboneSettings)
    return backbone.load(options.out, settings)


def first_rate(folder: Path) -> Rate | None:
    """The learning rate that the first network of a variant chose; the other networks use it too."""
    file = folder / "seed-0" / "training.json"
    if not file.exists():
        return None
    outside, inside = json.loads(file.read_text())["rate"]
    return outside, inside
