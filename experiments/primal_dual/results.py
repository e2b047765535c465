"""Results of the run folders, kept with the code: a file for each experiment, with a line for each run."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.results import DOCS
from experiments.runs import write_json

RESULTS, IMAGES = Path(__file__).parent / "results", DOCS / "images" / "primal-dual"


class Result(NamedTuple):
    """One run: its variant, its seed, and by name what its files hold ("run" is about the run itself)."""

    variant: str
    seed: int
    files: dict[str, Any]


def collect(runs: Path) -> None:
    """Take what run folders have found, beside what was kept before; figures of first networks too."""
    for folder in sorted(runs.glob("*")):
        found = {(result.variant, result.seed): result for result in kept(folder.name)}
        for run in sorted(folder.glob("*/seed-*")):
            files = {file.stem: json.loads(file.read_text()) for file in sorted(run.glob("*.json"))}
            if len(files) > 1:
                result = Result(run.parent.name, int(run.name.removeprefix("seed-")), files)
                found[result.variant, result.seed] = result
        RESULTS.mkdir(exist_ok=True)
        lines = [json.dumps(found[key]._asdict()) for key in sorted(found)]
        (RESULTS / f"{folder.name}.jsonl").write_text("\n".join(lines) + "\n")
    for file in sorted(runs.glob("*/*/seed-0/figures/*.png")):
        IMAGES.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, IMAGES / f"{file.parts[-5]}-{file.parts[-4]}-{file.name}")


def restore(runs: Path) -> None:
    """Make the run folders again of what is kept, so that experiments pass over it."""
    for file in sorted(RESULTS.glob("*.jsonl")):
        for result in kept(file.stem):
            folder = runs / file.stem / result.variant / f"seed-{result.seed}"
            folder.mkdir(parents=True, exist_ok=True)
            for name, value in result.files.items():
                write_json(folder / f"{name}.json", value)


def kept(experiment: str) -> Iterator[Result]:
    """All runs of an experiment that are kept."""
    file = RESULTS / f"{experiment}.jsonl"
    if file.exists():
        for line in file.read_text().splitlines():
            yield Result(**json.loads(line))


def values(experiment: str, variant: str, *path: str | int) -> list[Any]:
    """A number of every network of a variant: ``values("natops", "bn", "training", "accuracy")``."""
    found = []
    for result in kept(experiment):
        value: Any = result.files
        if result.variant == variant and path[0] in value:
            for step in path:
                value = value[step]
            found.append(value)
    return found
