"""Copy the small results of run folders into the repository, and read them for the pages."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.results import DOCS

HERE = Path(__file__).parent
RESULTS, IMAGES = HERE / "results", DOCS / "images" / "dual-form"


@dataclass(frozen=True)
class Seed:
    """The stored results of one run."""

    folder: Path

    def __getitem__(self, stage: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{stage}.json").read_text())

    def has(self, stage: str) -> bool:
        """Whether a stage has its result."""
        return (self.folder / f"{stage}.json").exists()


def collect(runs: Path) -> None:
    """Copy settings, numbers and figures, but no memories."""
    for file in sorted(runs.glob("*/*/seed-*/*.json")):
        if (file.parent / "training.json").exists():
            _copy(file, RESULTS / file.relative_to(runs))
    for file in sorted(runs.glob("*/*/seed-0/figures/*.png")):
        experiment, variant = file.parts[-5], file.parts[-4]
        _copy(file, IMAGES / f"{experiment}-{variant}-{file.name}")


def _copy(file: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)


def seeds(experiment: str, variant: str, stage: str) -> list[Seed]:
    """The runs of a variant that have completed a stage."""
    runs = [Seed(folder) for folder in sorted((RESULTS / experiment / variant).glob("seed-*"))]
    return [seed for seed in runs if seed.has(stage)]
