"""docs/architecture.md names files and functions that exist, and its walks stay short."""

import importlib
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "dualform"
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
HOP = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)
PLACE = re.compile(r"^\| [^|]+\? \| `([\w/]+\.py)` \|$", re.MULTILINE)


def walk(title: str) -> list[tuple[str, str]]:
    """The hops of a section: file and function."""
    section = TEXT.partition(f"### {title}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
    return HOP.findall(section)


@pytest.mark.parametrize(("file", "function"), HOP.findall(TEXT))
def test_every_hop_exists(file, function):
    place = importlib.import_module("dualform." + file.removesuffix(".py").replace("/", "."))
    for name in function.split("."):
        place = getattr(place, name)


@pytest.mark.parametrize("file", PLACE.findall(TEXT))
def test_every_place_exists(file):
    assert (SOURCE / file).is_file()


def test_the_page_answers_twenty_questions_and_has_four_walks():
    assert len(PLACE.findall(TEXT)) >= 20
    assert all(walk(title) for title in ("A batch to disk", "A question", "The same under Adam", "A page"))


def test_the_walks_are_short():
    batch, question = walk("A batch to disk"), walk("A question")
    assert len(batch) <= 25 and len({file for file, _ in batch}) <= 15
    assert len({file for file, _ in question}) <= 15
