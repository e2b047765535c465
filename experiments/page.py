"""Results pages. Every number on a page comes from a stored result file of a run."""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .results import Archive, table

Experiments = Mapping[str, Mapping[str, Any]]
"""Variants by experiment."""


@dataclass
class Page:
    """The results page of a paper, and the archive from which it is generated."""

    file: Path
    paper: str
    archive: Archive

    def main(self, head: str, parts: Sequence[Callable[[], str]], draw: Callable[[], object] = lambda: None) -> None:
        """Collect the results of run folders, draw the figures that summarise all runs, and write the page.

        ``--restore`` does the reverse: it recreates run folders from the stored results, so that missing runs can be
        added to them.
        """
        options = argparse.ArgumentParser()
        options.add_argument("--runs", type=Path, default=Path("runs") / self.paper)
        options.add_argument("--restore", action="store_true")
        arguments = options.parse_args()
        if arguments.restore:
            self.archive.restore(arguments.runs)
            return
        self.archive.collect(arguments.runs)
        draw()
        self.write(head, parts)
        print(self.file)

    def write(self, head: str, parts: Sequence[Callable[[], str]]) -> None:
        """Write the heading, all non-empty parts, and the machines of the runs."""
        experiments = [file.stem for file in sorted(self.archive.results.glob("*.jsonl"))]
        machines = sorted({run.files["run"]["machine"] for name in experiments for run in self.archive.kept(name)})
        footer = [f"Machine: {'; '.join(machines)}."] if machines else []
        self.file.write_text("\n\n".join([head, *(text for part in parts if (text := part())), *footer]) + "\n")


def missing_of(archive: Archive, experiments: Experiments, networks: Callable[[str], int]) -> str:
    """A sentence that lists the experiments with missing runs."""
    incomplete = [
        name
        for name, variants in experiments.items()
        if any(sum(run.variant == variant for run in archive.kept(name)) < networks(name) for variant in variants)
    ]
    return f"**Not run yet, or only in part:** {', '.join(incomplete)}." if incomplete else ""


def times_of(archive: Archive, experiments: Experiments, paper: str) -> str:
    """The commands and how long their runs took."""
    rows = []
    for name in experiments:
        seconds = [
            sum(stage.get("seconds", 0) for key, stage in result.files.items() if key != "run")
            for result in archive.kept(name)
        ]
        if seconds:
            rows.append([f"`dualform reproduce {paper}/{name}`", len(seconds), f"{sum(seconds) / 60:.0f}"])
    text = "Minutes: total over all networks, one thread, on a machine that also ran other jobs."
    return "\n\n".join(["## Commands and times", table(["command", "runs", "minutes"], rows), text]) if rows else ""


STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Half-width of a 95 % confidence interval in standard errors (Student's t), by the number of differences."""


def gain(base: Sequence[float], other: Sequence[float]) -> tuple[float, float] | None:
    """Mean paired difference between networks with the same seed, and the half-width of its 95 % confidence interval.

    Networks with the same seed share data or initial weights, so they are compared in pairs. None without 2 to 5 pairs.
    """
    count = min(len(base), len(other))
    if count not in STUDENT:
        return None
    gains = [b - a for a, b in zip(base, other, strict=False)]
    return statistics.mean(gains), STUDENT[count] * statistics.stdev(gains) / count**0.5


def side(mean_and_margin: tuple[float, float]) -> Literal["above", "below", "neither"]:
    """Whether the confidence interval of a gain excludes zero, and the sign of the gain."""
    mean, margin = mean_and_margin
    return "neither" if abs(mean) <= margin else "above" if mean > 0 else "below"


def sides(gains: Mapping[str, tuple[float, float] | None]) -> dict[str, list[str]]:
    """The names of the gains, grouped by ``side``."""
    names: dict[str, list[str]] = {"above": [], "below": [], "neither": []}
    for name, mean_and_margin in gains.items():
        if mean_and_margin is not None:
            names[side(mean_and_margin)].append(name)
    return names


def helps(before: str, lines: Sequence[str], *after: str) -> str:
    """The section that states the outcome first; empty if there are no results yet."""
    return "\n\n".join(["## Does it help?", before, "\n".join(lines), *after]) if lines else ""


def gain_over(base: Sequence[float], other: Sequence[float]) -> str:
    """``gain`` as text, in bold if the confidence interval excludes zero."""
    mean_and_margin = gain(base, other)
    if mean_and_margin is None:
        return "–"
    mean, margin = mean_and_margin
    text = f"{mean:+.1f} ± {margin:.1f}"
    return text if side(mean_and_margin) == "neither" else f"**{text}**"


def worst_errors(certificate: Mapping[str, float], idle: str = "") -> tuple[float, float]:
    """The largest relative error of a parameter, and separately that of biases that have ``idle`` in their names.

    These are key biases: they do not affect a softmax, so their gradients are rounding errors.
    """
    idle_biases = {name for name in certificate if idle and idle in name and name.endswith("bias")}
    worst = max(error for name, error in certificate.items() if name not in idle_biases)
    return worst, max((certificate[name] for name in idle_biases), default=0.0)
