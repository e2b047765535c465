"""Training examples as CSV, with cells that a spreadsheet does not take for formulas."""

import csv
from collections.abc import Sequence
from io import StringIO
from typing import Any

import numpy as np
from jaxtyping import Int

from ..explorer import Explorer
from ..work import PendingWork
from .lines import lines_of
from .question import TrainingSetQuestion, noted_columns, settle_choice
from .table import TrainingTable, training_table

FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")

COLUMNS = {
    "label": "label", "class": "label_name", "suggested": "suggested", "suspicion": "suspicion",
    "against other labels": "against", "adds in sum": "adds", "size": "size", "loss": "loss",
    "confidence": "confidence", "adds to its own label": "own", "visits": "visits",
}  # fmt: skip
"""The columns of the file, and the fields of a line that they hold."""


def suspects_csv(explorer: Explorer, choice: TrainingSetQuestion) -> str | PendingWork:
    """All training examples as CSV, the most suspicious first; pending work if something of it takes long."""
    table = training_table(explorer, settle_choice(explorer, choice))
    if table.pending:
        return table.pending[0]
    by = next((name for name in ("suspicion", "against", "adds") if name in table.numbers), "visits")
    values = table.numbers[by]
    return _csv(explorer, table, np.argsort(np.where(np.isnan(values), np.inf, -values), kind="stable"))


def selection_csv(explorer: Explorer, choice: TrainingSetQuestion) -> str:
    """The selected training examples as CSV, with what is known by now: cells of what was not computed are empty."""
    table = training_table(explorer, settle_choice(explorer, choice))
    places = [table.examples.place[name] for name in explorer.selection if name in table.examples.place]
    return _csv(explorer, table, places)


def _csv(explorer: Explorer, table: TrainingTable, places: Sequence[int] | Int[np.ndarray, " m"]) -> str:
    text, noted = StringIO(), noted_columns(explorer)
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow([_cell(name) for name in (explorer.index, *COLUMNS, *noted)])
    for line in lines_of(explorer, table, places, pictures=False):
        cells = [line.index, *(getattr(line, name) for name in COLUMNS.values()), *(line.noted[name] for name in noted)]
        writer.writerow(["" if cell is None else _cell(cell) for cell in cells])
    return text.getvalue()


def _cell(value: Any) -> Any:
    """A value that a spreadsheet does not take for a formula."""
    return f"'{value}" if isinstance(value, str) and value.strip()[:1] in FORMULA else value
