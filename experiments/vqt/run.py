"""Experiments after "Visual Query Tuning" (Tu, Mai, Chao 2023), one at a time: ``dualform reproduce vqt/mnist``."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dualform.models import ViT
from experiments.runs import Options, begin, console

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
from .training import transfer

__all__ = ["EXPERIMENTS", "ON_REQUEST", "reproduce"]


def reproduce(experiment: str, options: Options) -> None:
    """Run an experiment: every network that has its result already is passed over."""
    if options.threads:
        torch.set_num_threads(options.threads)
    for seed in range(options.seeds or (1 if experiment in ONCE else NETWORKS)):
        for name in options.variants:
            settings = replace(prepared(EXPERIMENTS[experiment][name], options), seed=seed)
            run = begin(options.out / "vqt" / experiment / name / f"seed-{seed}", f"vqt/{experiment}", settings)
            if isinstance(settings, BackboneSettings):
                run.stages({"training": partial(backbone.train_backbone, run, settings)})
            elif isinstance(settings, CostSettings):
                run.stages({"cost": partial(measure, settings)})
            elif experiment == "recorded":
                vit = partial(trained_backbone, options)
                run.stages({
                    "training": lambda: train_recorded(run, vit(), settings),  # noqa: B023 # called at once
                    "asked": lambda: ask(run, vit(), settings),  # noqa: B023
                })  # fmt: skip
            else:
                rate = first_rate(run.folder.parent) if seed else None
                run.stages({"training": lambda: transfer(trained_backbone(options), settings, rate)})  # noqa: B023
            if not options.keep:
                run.forget_memory()
            console.print(f"{run.folder}: done")


def prepared(settings: Any, options: Options) -> Any:
    """The settings, or the same for a few steps."""
    return tiny(settings) if options.quick else settings


def trained_backbone(options: Options) -> ViT:
    """The backbone that all share."""
    made = prepared(EXPERIMENTS["backbone"][SOURCE], options)
    assert isinstance(made, BackboneSettings)
    return backbone.load(options.out, made)


def first_rate(folder: Path) -> float | None:
    """The rate that the first network of a variant chose: the others take it too."""
    file = folder / "seed-0" / "training.json"
    return json.loads(file.read_text())["rate"] if file.exists() else None
