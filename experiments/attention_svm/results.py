"""Results copied from the run folders and kept with the code; the page and its figures are made from them."""

from pathlib import Path
from typing import Any

from experiments.results import DOCS, Archive

ARCHIVE = Archive(Path(__file__).parent / "results", DOCS / "images" / "attention-svm")


def found(experiment: str, variant: str) -> dict[str, Any] | None:
    """Result of the first seed of a variant, or None if it is not kept."""
    return next((result.files["found"] for result in ARCHIVE.kept(experiment) if result.variant == variant), None)
