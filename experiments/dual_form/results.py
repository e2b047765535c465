"""Results of the run folders, collected: what is small is kept with the code, and pages are made of that."""

import json
import shutil
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE, DOCS = Path(__file__).parent, Path(__file__).parents[2] / "docs"
RESULTS, IMAGES = HERE / "results", DOCS / "images" / "dual-form"


@dataclass(frozen=True)
class Seed:
    """One run."""

    folder: Path

    def __getitem__(self, stage: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{stage}.json").read_text())

    def has(self, stage: str) -> bool:
        """Whether a stage has its result."""
        return (self.folder / f"{stage}.json").exists()


def collect(runs: Path) -> None:
    """Copy what is small."""
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
    """The runs of a variant that have come through a stage."""
    found = [Seed(folder) for folder in sorted((RESULTS / experiment / variant).glob("seed-*"))]
    return [seed for seed in found if seed.has(stage)]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean and sample deviation."""
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
