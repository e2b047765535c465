"""Results pages: every number on them stands in a file that is kept of a run."""

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
    """A page about a paper, and the archive that it is made of."""

    file: Path
    paper: str
    archive: Archive

    def main(self, head: str, parts: Sequence[Callable[[], str]], draw: Callable[[], object] = lambda: None) -> None:
        """Collect results of run folders, draw what is drawn of them all, and write the page.

        ``--restore`` goes the other way: it makes run folders of what is kept, so that runs go on from there.
        """
        options = argparse.ArgumentParser()
        options.add_argument("--runs", type=Path, default=Path("runs") / self.paper)
        options.add_argument("--restore", action="store_true")
        asked = options.parse_args()
        if asked.restore:
            self.archive.restore(asked.runs)
            return
        self.archive.collect(asked.runs)
        draw()
        self.write(head, parts)
        print(self.file)

    def write(self, head: str, parts: Sequence[Callable[[], str]]) -> None:
        """Parts that have something to say, and the machines."""
        experiments = [file.stem for file in sorted(self.archive.results.glob("*.jsonl"))]
        machines = sorted({r.files["run"]["machine"] for name in experiments for r in self.archive.kept(name)})
        end = [f"Machine: {'; '.join(machines)}."] if machines else []
        self.file.write_text("\n\n".join([head, *(text for part in parts if (text := part())), *end]) + "\n")


def missing_of(archive: Archive, experiments: Experiments, networks: Callable[[str], int]) -> str:
    """What is not run yet, or not as often as it should be."""
    short_of = [
        name
        for name, variants in experiments.items()
        if any(sum(r.variant == variant for r in archive.kept(name)) < networks(name) for variant in variants)
    ]
    return f"**Not run yet, or in part:** {', '.join(short_of)}." if short_of else ""


def times_of(archive: Archive, experiments: Experiments, paper: str) -> str:
    """How long it takes."""
    rows = []
    for name in experiments:
        seconds = [
            sum(stage.get("seconds", 0) for key, stage in result.files.items() if key != "run")
            for result in archive.kept(name)
        ]
        if seconds:
            rows.append([f"`dualform reproduce {paper}/{name}`", len(seconds), f"{sum(seconds) / 60:.0f}"])
    text = "Minutes are of one thread beside other work, all networks together."
    return "\n\n".join(["## Commands and times", table(["command", "runs", "minutes"], rows), text]) if rows else ""


STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Of so many differences, how many standard errors hold their mean in 95 % of all cases."""


def gain(base: Sequence[float], other: Sequence[float]) -> tuple[float, float] | None:
    """How far networks lie above others that share their seeds, one by one, and what holds that in 95 % of all cases.

    Networks with the same seed share data or where they begin, so it is their differences that are looked at.
    """
    count = min(len(base), len(other))
    if count not in STUDENT:
        return None
    gains = [b - a for a, b in zip(base, other, strict=False)]
    return statistics.mean(gains), STUDENT[count] * statistics.stdev(gains) / count**0.5


def side(found: tuple[float, float]) -> Literal["above", "below", "neither"]:
    """Whether a gain is more than chance, and which way."""
    return "neither" if abs(found[0]) <= found[1] else "above" if found[0] > 0 else "below"


def sides(gains: Mapping[str, tuple[float, float] | None]) -> dict[str, list[str]]:
    """By the side on which they lie, the names of gains."""
    found: dict[str, list[str]] = {"above": [], "below": [], "neither": []}
    for name, each in gains.items():
        if each is not None:
            found[side(each)].append(name)
    return found


def helps(before: str, lines: Sequence[str], *after: str) -> str:
    """The part of a page that says first what came out; nothing where there is nothing yet."""
    return "\n\n".join(["## Does it help?", before, "\n".join(lines), *after]) if lines else ""


def gain_over(base: Sequence[float], other: Sequence[float]) -> str:
    """The same as text; bold where it is more than chance."""
    found = gain(base, other)
    if found is None:
        return "–"
    text = f"{found[0]:+.1f} ± {found[1]:.1f}"
    return text if side(found) == "neither" else f"**{text}**"


def worst_errors(certificate: Mapping[str, float], idle: str = "") -> tuple[float, float]:
    """The worst relative error of a parameter; and apart from it that of biases that have ``idle`` in their names.

    Those are of keys: a softmax does not see them, so what training makes of them is rounding.
    """
    apart = {name for name in certificate if idle and idle in name and name.endswith("bias")}
    worst = max(error for name, error in certificate.items() if name not in apart)
    return worst, max((certificate[name] for name in apart), default=0.0)
