"""Training examples as lines of a page or of a file, each with all that is known of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from jaxtyping import Int

from ...examples import ShownExample
from ..explorer import Explorer
from .examples import NotedColumn
from .table import TrainingTable

FEATURES = 24
"""The most features of a row of a table that are shown."""


@dataclass(frozen=True)
class ExampleLine:
    """One training example with all that is known of it; None is not known, or not computed yet."""

    index: Any
    shown: ShownExample | None
    label: Any
    label_name: str | None
    selected: bool
    visits: int
    first_step: int | None
    last_step: int | None
    adds: float | None = None
    """The sum of its contributions to the right answers of the test examples."""
    size: float | None = None
    """The sum of their absolute values: how much it matters, for good or ill."""
    against: float | None = None
    """What it takes from the right answers of test examples with another label than its own."""
    suspicion: float | None = None
    """The probability that its label is wrong."""
    suspect: bool = False
    """Whether another label is likelier than its own."""
    suggested: str | None = None
    """The likeliest other label."""
    loss: float | None = None
    confidence: float | None = None
    own: float | None = None
    """What it added to the margin of its own label, through the last layer."""
    noted: dict[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    """A row of a table, feature by feature."""


def lines_of(
    explorer: Explorer, table: TrainingTable, places: Sequence[int] | Int[np.ndarray, " m"], pictures: bool = True
) -> list[ExampleLine]:
    """Some training examples, each with its numbers."""
    examples, lines = table.examples, []
    for place in map(int, places):
        name, label, suggested = examples.names[place], examples.labels[place], int(table.suggested[place])
        numbers: dict[str, Any] = {
            key: None if np.isnan(values[place]) else float(values[place])
            for key, values in table.numbers.items()
            if key != "visits"
        }
        visits, shown = int(examples.visits[place]), explorer.trained_on(name) if pictures else None
        lines.append(
            ExampleLine(
                name,
                shown,
                label,
                label_name(explorer, label),
                name in explorer.selected,
                visits,
                int(examples.first_step[place]) if visits else None,
                int(examples.last_step[place]) if visits else None,
                suspect=bool(table.suspect[place]),
                suggested=explorer.class_name(suggested) if suggested >= 0 else None,
                noted={key: _noted_text(column, place) for key, column in examples.noted.items()},
                features=features_of(explorer, shown),
                **numbers,
            )
        )
    return lines


def label_name(explorer: Explorer, label: Any) -> str | None:
    """A label as people read it."""
    return None if label is None else explorer.class_name(label) if isinstance(label, int) else str(label)


def feature_names(explorer: Explorer) -> tuple[str, ...]:
    """The names of the features of an example, if it is a row of a table or of numbers."""
    like = explorer.train or explorer.test
    if like is None or like.kind != "numbers":
        return ()
    if like.columns is not None and like.shape == (len(like.columns.features),):
        return like.columns.names[:FEATURES]
    return tuple(f"x{place}" for place in range(min(FEATURES, prod(like.shape))))


def features_of(explorer: Explorer, shown: ShownExample | None) -> tuple[str, ...]:
    """The features of an example as they stand in the table."""
    like = explorer.train or explorer.test
    if shown is None or shown.kind != "numbers":
        return ()
    if shown.words and like is not None and like.columns is not None:
        return tuple(
            word.removeprefix(f"{column} ") for column, word in zip(like.columns.names, shown.words, strict=False)
        )
    return tuple(f"{value:.4g}" for value in shown.numbers)


def _noted_text(column: NotedColumn, place: int) -> Any:
    value = column.values[place]
    return f"{value}, …" if column.varies[place] else value
