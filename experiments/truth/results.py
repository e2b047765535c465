"""Results of the run folders, kept with the code."""

from pathlib import Path

from experiments.results import DOCS, Archive

ARCHIVE = Archive(Path(__file__).parent / "results", DOCS / "images" / "truth")
