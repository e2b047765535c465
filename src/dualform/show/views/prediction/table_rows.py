"""Training examples as rows of one table, beside the row that is asked about: where do they differ?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dualform.data import in_table

from ..explorer import ExamplePlace, Explorer
from .top_examples import TopExample

CLOSE, FAR = 0.25, 1.0
"""Differences in deviations of a column: below the first two numbers count as alike, above the second as far apart."""


@dataclass(frozen=True)
class TableCell:
    """A value as it stands in the table; ``differs`` from 0 (alike) to 2 (far apart)."""

    text: str
    differs: int


@dataclass(frozen=True)
class TableLine:
    """One training example."""

    example: TopExample
    cells: list[TableCell]


@dataclass(frozen=True)
class TableRows:
    """The columns, those that differ most first, the row that is asked about, and the training examples."""

    columns: list[str]
    asked: list[str]
    lines: list[TableLine]


def table_rows(explorer: Explorer, place: ExamplePlace, examples: Sequence[TopExample]) -> TableRows | None:
    """The examples as a table; None unless the data is a table with names of its columns."""
    like = explorer.test or explorer.train
    if like is None or like.columns is None or like.kind != "numbers" or not like.columns.names:
        return None
    names = like.columns.names
    asked = like.columns.cells(explorer.tensor(place))
    rows = [_trained_row(explorer, example.index) for example in examples]
    spreads = (explorer.train or like).spreads
    differences = [
        [0.0 if row is None else _difference(*values) for values in zip(asked, row or asked, spreads, strict=True)]
        for row in rows
    ]
    apart = torch.tensor(differences).mean(0) if differences else torch.zeros(len(names))
    order = apart.argsort(descending=True, stable=True).tolist()
    lines = [
        TableLine(
            example, [TableCell("" if row is None else in_table(row[i]), _step(differences[line][i])) for i in order]
        )
        for line, (example, row) in enumerate(zip(examples, rows, strict=True))
    ]  # fmt: skip
    return TableRows([names[i] for i in order], [in_table(asked[i]) for i in order], lines)


def _trained_row(explorer: Explorer, index: object) -> list[float | str] | None:
    train = explorer.train
    if train is None or not isinstance(index, int) or not 0 <= index < len(train):
        return None
    return train.table_row(index)


def _difference(asked: float | str, value: float | str, spread: float) -> float:
    """How far two values of a column are apart, in its deviations; different words are far apart."""
    if isinstance(asked, str) or isinstance(value, str):
        return 0.0 if asked == value else 2 * FAR
    return abs(asked - value) / (spread or 1.0)


def _step(difference: float) -> int:
    return 0 if difference < CLOSE else 1 if difference < FAR else 2
