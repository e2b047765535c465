"""The archive of stored results, part of the repository."""

from pathlib import Path

from experiments.results import DOCS, Archive

ARCHIVE = Archive(Path(__file__).parent / "results", DOCS / "images" / "key-driven-gqa")
