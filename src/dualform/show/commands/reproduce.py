"""The papers' experiments, run by name. They live beside the library, in the source tree."""

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
}
"""Each with ``EXPERIMENTS``, variants by name, ``ON_REQUEST``, variants that are only run where they are named, and
``reproduce(experiment, options)``."""


def source_tree() -> Path:
    """The folder that holds the experiments: that of the library's own source, or the working folder."""
    for folder in (Path(__file__).parents[3], Path.cwd()):
        if (folder / "experiments" / "runs.py").is_file():
            return folder
    raise DataNotFound(
        "the experiments come with the source of dualform, not with the installed package: run this in a clone of it."
    )


def paper(name: str) -> ModuleType:
    """The experiments of a paper."""
    if name not in PAPERS:
        raise QueryError(f"no paper '{name}' is reproduced here: there are {list(PAPERS)}.")
    tree = str(source_tree())
    if tree not in sys.path:
        sys.path.insert(0, tree)
    return import_module(PAPERS[name])


def known() -> list[str]:
    """All experiments."""
    return [f"{name}/{experiment}" for name in PAPERS for experiment in paper(name).EXPERIMENTS]


def reproduce(name: str, variants: Sequence[str], **options: Any) -> None:
    """Run an experiment, or all of a paper."""
    first, _, experiment = name.partition("/")
    module = paper(first)
    if experiment and experiment not in module.EXPERIMENTS:
        raise QueryError(f"{first} has no experiment '{experiment}': it has {list(module.EXPERIMENTS)}.")
    for each in [experiment] if experiment else module.EXPERIMENTS:
        names = list(module.EXPERIMENTS[each])
        all_names = [*names, *module.ON_REQUEST.get(each, {})]
        if unknown := [variant for variant in variants if variant not in all_names]:
            raise QueryError(f"{first}/{each} has no variant '{unknown[0]}': it has {all_names}.")
        module.reproduce(each, import_module("experiments.runs").Options(variants=tuple(variants or names), **options))
