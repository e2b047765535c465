"""Every training example once: its label, its visits, and what was noted of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int

from dualform.errors import QueryError

from ..explorer import Explorer
from ..work import PendingWork
from .question import noted_columns

DECODE = 4e-7
"""Seconds to write a token of a text as words."""


@dataclass(frozen=True, eq=False)
class NotedColumn:
    """What was noted of each example: the value of its first visit, and whether later visits have other values."""

    values: list[Any]
    varies: Bool[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class TrainingExamples:
    """All examples of the training data, and those that only the visits name."""

    names: list[Any]
    """The index of each, as it was noted."""
    place: dict[Any, int]
    """Where each index stands in all lists."""
    labels: list[Any]
    visits: Int[np.ndarray, " n"]
    first_step: Int[np.ndarray, " n"]
    last_step: Int[np.ndarray, " n"]
    noted: dict[str, NotedColumn]
    place_of_visit: Int[np.ndarray, " V"]
    """Which example each visit was of; −1 where that is not known."""

    def __len__(self) -> int:
        return len(self.names)


def training_examples(explorer: Explorer) -> TrainingExamples:
    """All training examples, cached. Of one long text the examples are the stretches that training saw."""
    examples = explorer.work_queue.result(
        ("training examples",), "the training examples", 0.0, lambda _: _collected(explorer)
    )
    assert not isinstance(examples, PendingWork)
    return examples


def texts_of(explorer: Explorer, examples: TrainingExamples) -> list[str] | PendingWork:
    """The text of each example in small letters, cached; pending work if there are very many."""
    train = explorer.train
    assert train is not None
    seconds = DECODE * len(examples) * train.shape[0]

    def text(name: Any) -> str:
        shown = explorer.trained_on(name)
        return "" if shown is None else "".join(shown.tokens).lower()

    return explorer.work_queue.result(
        ("texts",), "the texts to search in", seconds, lambda _: [text(name) for name in examples.names]
    )


def _collected(explorer: Explorer) -> TrainingExamples:
    train, table = explorer.train, explorer.memory.visits
    names: list[Any] = [] if train is None or train.is_stream else list(range(len(train)))
    place_of_visit = np.full(len(table), -1)
    if explorer.index in table.column_names:
        values, group = _encoded(table[explorer.index])
        present = set(names)
        names += sorted((v for v in values if v not in present), key=lambda value: (str(type(value)), value))
        place = {name: number for number, name in enumerate(names)}
        numbers = np.array([*(place[value] for value in values), -1])
        place_of_visit = numbers[group]
    if not names:
        raise QueryError(
            f"the training examples are not known: note a column '{explorer.index}' while recording, or give them with "
            "--data."
        )
    place = {name: number for number, name in enumerate(names)}
    n, steps = len(names), table["step"].to_numpy()
    known = np.flatnonzero(place_of_visit >= 0)
    places = place_of_visit[known]
    first, last = np.full(n, -1), np.full(n, -1)
    last[places] = steps[known]  # visits are in the order of training
    first[places[::-1]] = steps[known][::-1]
    labels = [trained_label(explorer, name) for name in names]
    noted = {
        name: _noted(table[name], known, places, n) for name in noted_columns(explorer) if name in table.column_names
    }
    visits = np.bincount(places, minlength=n)
    return TrainingExamples(names, place, labels, visits, first, last, noted, place_of_visit)


def _encoded(column: pa.ChunkedArray) -> tuple[Sequence[Any], Int[np.ndarray, " V"]]:
    """The different values of a column, and which of them each line has (one more than the last: none)."""
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    values = encoded.dictionary.to_pylist()
    return values, encoded.indices.fill_null(len(values)).to_numpy(zero_copy_only=False)


def _noted(column: pa.ChunkedArray, known: np.ndarray, places: np.ndarray, n: int) -> NotedColumn:
    values, group = _encoded(column)
    group, first = group[known], np.full(n, len(values))
    first[places[::-1]] = group[::-1]
    varies = np.zeros(n, bool)
    varies[places[group != first[places]]] = True
    return NotedColumn([values[number] if number < len(values) else None for number in first], varies)


def trained_label(explorer: Explorer, name: Any) -> Any:
    """The label that an example was trained with: as it was noted, else that of the data; None if neither is known."""
    noted = explorer.own_labels.get(name)
    if noted is not None or explorer.train is None or not isinstance(name, int):
        return noted
    return explorer.train.label(name)
