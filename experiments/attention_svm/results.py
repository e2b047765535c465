"""Results of the run folders, kept with the code; the figures are drawn of them."""

from pathlib import Path
from typing import Any

from experiments.results import DOCS, Archive

ARCHIVE = Archive(Path(__file__).parent / "results", DOCS / "images" / "attention-svm")


def found(experiment: str, variant: str) -> dict[str, Any] | None:
    """What the first seed of a variant found, if it is kept."""
    return next((result.files["found"] for result in ARCHIVE.kept(experiment) if result.variant == variant), None)
