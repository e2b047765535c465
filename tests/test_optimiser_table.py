"""The table of optimisers and kinds of layers in the documents is whole, within its bars, and can be made again."""

import re
from pathlib import Path
from typing import Any

import pytest

from dualform.record import KINDS, kind_of
from dualform.record.layers.table import KINDS_BY_NAME
from dualform.rules import RULES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script(benchmark) -> Any:
    return benchmark("optimisers")


def sections() -> dict[str, str]:
    """The text below each heading."""
    text = (ROOT / "docs" / "results" / "optimisers.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def table(precision: str) -> dict[tuple[str, str], str]:
    """(optimiser, kind) to what stands in the cell."""
    text = next(text for title, text in sections().items() if f"{precision} memory" in title)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    (_, *kinds), _, *lines = rows
    return {(name, kind): cell for name, *cells in lines for kind, cell in zip(kinds, cells, strict=True)}


every_precision = pytest.mark.parametrize("precision", ["float64", "float32", "float16"])


@every_precision
def test_every_optimiser_and_every_kind_of_layer_is_in_the_table(precision, script):
    names, kinds = ({pair[i] for pair in table(precision)} for i in (0, 1))
    assert names == set(script.OPTIMISERS) and kinds == set(script.NETWORKS)
    assert {optimizer.__name__ for optimizer in RULES} | {"Lion"} <= names
    modules = [part for network in script.NETWORKS.values() for part in network.make().modules()]
    tried = {type(kind) for part in modules if (kind := kind_of(part))}
    assert {type(kind) for kind in (*KINDS.values(), *KINDS_BY_NAME.values())} <= tried
    assert all(any(isinstance(part, layer) for part in modules) for layer in KINDS)


@every_precision
def test_every_cell_is_within_its_bar_or_says_why_not(precision, script):
    notes = dict(re.findall(r"^- \[(\w)\] (.+)", sections()["Notes"], flags=re.MULTILINE))
    for name, cell in table(precision).items():
        match = re.fullmatch(r"(\d\.\de[-+]\d\d)(?: \((\d\.\de[-+]\d\d)\))?(?: \[(\w)\])?", cell)
        assert match, (name, cell)
        error, floor, note = match.groups()
        bar = max(script.BARS.get(precision, script.LARGE), float(floor or 0.0))
        assert float(error) <= bar or note in notes, (name, cell)
        assert note is None or note in notes, (name, cell)
        assert note != "m" or name[0] == "Muon", (name, cell)


@pytest.mark.parametrize(
    "cell",
    [("AdamW", "lstm", "float64"), ("Lion", "attention", "float64"), ("Adafactor", "conv2d", "float32")],
    ids=str,
)
def test_a_cell_can_be_made_again(cell, script, tmp_path):
    found, _ = script.train(*cell, tmp_path / "memory", steps=20)
    assert found.errors and not found.marks
    assert not found.beyond, {name: found.errors[name] for name in found.beyond}
