"""What is kept of runs with the code, and how pages show it."""

import json
import shutil
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .runs import write_json

DOCS = Path(__file__).parents[1] / "docs"


class Result(NamedTuple):
    """One run: its variant, its seed, and by name what its files hold ("run" is about the run itself)."""

    variant: str
    seed: int
    files: dict[str, Any]


@dataclass
class Archive:
    """Results of the run folders of a paper: a file for each experiment, with a line for each run; and figures."""

    results: Path
    images: Path

    def collect(self, runs: Path) -> None:
        """Take what run folders have found, beside what was kept before; tables and figures of first networks too."""
        for folder in sorted(runs.glob("*")):
            found = {(result.variant, result.seed): result for result in self.kept(folder.name)}
            for run in sorted(folder.glob("*/seed-*")):
                files = {file.stem: json.loads(file.read_text()) for file in sorted(run.glob("*.json"))}
                if len(files) > 1:
                    result = Result(run.parent.name, int(run.name.removeprefix("seed-")), files)
                    found[result.variant, result.seed] = result
            if found:
                self.results.mkdir(exist_ok=True)
                lines = [json.dumps(found[key]._asdict()) for key in sorted(found)]
                (self.results / f"{folder.name}.jsonl").write_text("\n".join(lines) + "\n")
        for file in sorted(runs.glob("*/*/seed-0/*.csv")):
            shutil.copyfile(file, self.results / f"{file.parts[-4]}-{file.parts[-3]}.csv")
        for file in sorted(runs.glob("*/*/seed-0/figures/*.png")):
            self.images.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, self.images / f"{file.parts[-5]}-{file.parts[-4]}-{file.name}")

    def restore(self, runs: Path) -> None:
        """Make the run folders again of what is kept, so that experiments pass over it."""
        for file in sorted(self.results.glob("*.jsonl")):
            for result in self.kept(file.stem):
                folder = runs / file.stem / result.variant / f"seed-{result.seed}"
                folder.mkdir(parents=True, exist_ok=True)
                for name, value in result.files.items():
                    write_json(folder / f"{name}.json", value)

    def kept(self, experiment: str) -> Iterator[Result]:
        """All runs of an experiment that are kept."""
        file = self.results / f"{experiment}.jsonl"
        if file.exists():
            for line in file.read_text().splitlines():
                yield Result(**json.loads(line))

    def values(self, experiment: str, variant: str, *path: str | int) -> list[Any]:
        """A number of every network of a variant: ``values("natops", "bn", "training", "accuracy")``."""
        found = []
        for result in self.kept(experiment):
            value: Any = result.files
            if result.variant == variant and path[0] in value:
                for step in path:
                    value = value[step]
                found.append(value)
        return found


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
