"""``dualform reproduce``: run an experiment of a paper by name. The experiments are in the source tree."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from dualform.errors import DataNotFound, QueryError

PAPERS = {
    "dual-form": "experiments.dual_form.run",
    "primal-dual": "experiments.primal_dual.run",
    "attention-svm": "experiments.attention_svm.run",
    "rcmha": "experiments.rcmha.run",
    "vqt": "experiments.vqt.run",
    "key-driven-gqa": "experiments.key_driven_gqa.run",
    "truth": "experiments.truth.run",
}
"""The module of each paper. It has ``EXPERIMENTS`` (the variants of each experiment by name), ``ON_REQUEST`` (variants
that only run if they are named), and a function ``reproduce(experiment, options)``."""


def source_tree() -> Path:
    """The folder that holds the experiments: the library's own source tree, or the working folder."""
    for folder in (Path(__file__).parents[3], Path.cwd()):
        if (folder / "experiments" / "runs.py").is_file():
            return folder
    raise DataNotFound(
        "the experiments are part of dualform's source tree, not of the installed package. Run this command in a clone."
    )


def paper(name: str) -> ModuleType:
    """The module with the experiments of a paper."""
    if name not in PAPERS:
        raise QueryError(f"there are no experiments of a paper '{name}': choose one of {list(PAPERS)}.")
    tree = str(source_tree())
    if tree not in sys.path:
        sys.path.insert(0, tree)
    return import_module(PAPERS[name])


def experiment_names() -> list[str]:
    """All experiments, as paper/experiment."""
    return [f"{name}/{experiment}" for name in PAPERS for experiment in paper(name).EXPERIMENTS]


def reproduce(name: str, variants: Sequence[str], **options: Any) -> None:
    """Run an experiment, or all experiments of a paper."""
    first, _, experiment = name.partition("/")
    module = paper(first)
    if experiment and experiment not in module.EXPERIMENTS:
        raise QueryError(f"{first} has no experiment '{experiment}': it has {list(module.EXPERIMENTS)}.")
    for experiment_name in [experiment] if experiment else module.EXPERIMENTS:
        names = list(module.EXPERIMENTS[experiment_name])
        all_names = [*names, *module.ON_REQUEST.get(experiment_name, {})]
        if unknown := [variant for variant in variants if variant not in all_names]:
            raise QueryError(f"{first}/{experiment_name} has no variant '{unknown[0]}': it has {all_names}.")
        module.reproduce(
            experiment_name, import_module("experiments.runs").Options(variants=tuple(variants or names), **options)
        )
