"""A run folder: what was asked for, with which versions, and what came of it. All as text, so it can be repeated.

run.json          the experiment, its settings, versions, the machine
<stage>.json      what a stage found, and how long it took; a stage that has its file is not run again
figures/          what was drawn
memory/           what was recorded, until its answers are written
"""

import json
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from rich.console import Console

from dualform.errors import QueryError
from dualform.show.machine import processors

PACKAGES = ("dualform", "torch", "numpy", "pyarrow", "safetensors")
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Options:
    """How experiments are run."""

    variants: tuple[str, ...]
    seeds: int = 0
    """How many networks of each variant; 0 for as many as the experiment's page has."""
    out: Path = Path("runs")
    quick: bool = False
    threads: int = 0
    keep: bool = False


@dataclass(frozen=True)
class Run:
    """One run of an experiment."""

    folder: Path
    experiment: str
    settings: Any

    @property
    def memory(self) -> Path:
        """Where the memory is recorded."""
        return self.folder / "memory"

    @property
    def figures(self) -> Path:
        """Where figures go."""
        (self.folder / "figures").mkdir(exist_ok=True)
        return self.folder / "figures"

    def stages(self, work: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
        """Do what has no result yet. The first stage records the memory, and is done again if others miss it."""
        first, *others = work
        missing = [name for name in others if not self._file(name).exists()]
        if missing and not self.memory.exists():
            self._file(first).unlink(missing_ok=True)
        for name in (first, *missing):
            if not self._file(name).exists():
                self._do(name, work[name])

    def again_without(self, stage: str, weights: Path) -> None:
        """Let a stage be done again if its weights are missing: of results that are kept, these are not."""
        if not weights.exists():
            self._file(stage).unlink(missing_ok=True)

    def _do(self, name: str, work: Callable[[], Mapping[str, Any]]) -> None:
        console.print(f"{self.experiment}, {self.folder.parent.name}, {self.folder.name}: {name} …")
        begin = time.perf_counter()
        found = dict(work())
        found["seconds"] = round(time.perf_counter() - begin, 2)
        found["peak_megabytes"] = round(getrusage(RUSAGE_SELF).ru_maxrss / 1024)
        write_json(self._file(name), found)

    def _file(self, stage: str) -> Path:
        return self.folder / f"{stage}.json"

    def forget_memory(self) -> None:
        """Delete the memory: its answers are written."""
        shutil.rmtree(self.memory, ignore_errors=True)


def each_run(
    paper: str,
    experiment: str,
    options: Options,
    variants: Mapping[str, Any],
    networks: int,
    tiny: Callable[[Any], Any],
    seeded: Callable[[Any, int], Any] = lambda settings, seed: replace(settings, seed=seed),
) -> Iterator[tuple[Run, Any]]:
    """The runs of an experiment with their settings, network by network. What was recorded is forgotten after each.

    ``tiny`` makes settings for a few steps of those in full, ``seeded`` those of one network.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    for seed in range(options.seeds or networks):
        for name in options.variants:
            settings = seeded(tiny(variants[name]) if options.quick else variants[name], seed)
            run = begin(options.out / paper / experiment / name / f"seed-{seed}", f"{paper}/{experiment}", settings)
            yield run, settings
            if not options.keep:
                run.forget_memory()
            console.print(f"{run.folder}: done")


def begin(folder: Path, experiment: str, settings: Any) -> Run:
    """Begin a run, or go on with one of the same settings."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = json.loads(json.dumps(asdict(settings)))
    file = folder / "run.json"
    if file.exists():
        found = json.loads(file.read_text())
        if (found["experiment"], found["settings"]) != (experiment, asked):
            raise QueryError(
                f"{folder} holds a run of {found['experiment']} with other settings ({found['settings']}). Choose "
                "another folder with --out, or remove it."
            )
    else:
        about = {
            "experiment": experiment,
            "settings": asked,
            "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
            "machine": f"{processors()}, {torch.get_num_threads()} torch threads",
        }
        write_json(file, about)
    return Run(folder, experiment, settings)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(file)
