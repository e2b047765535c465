"""One training example: what it is, which test answers it moves, when it was learned, and which others are like it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dualform.errors import QueryError

from ..text import need_logits
from .explorer import ClassScore, ExamplePlace, Explorer
from .training import (
    ExampleLine,
    LearnedOverTime,
    MovedAnswers,
    Neighbours,
    TrainingSetQuestion,
    feature_names,
    learned_over_time,
    lines_of,
    moved_answers,
    neighbours_of,
    right_target,
    settle_choice,
    training_examples,
    training_table,
)
from .work import PendingWork

MOST_VISITS, SAID = 200, 3
"""Visits that are listed, and classes of the answer that are shown."""


@dataclass(frozen=True)
class ExampleView:
    """Everything the page shows."""

    line: ExampleLine
    """The example with all numbers that are known of it by now."""
    asked_at: ExamplePlace | None
    """Where the network can be asked about it; None if its data were not given."""
    says: list[ClassScore]
    features: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    """The names of the features of an example, if it is a row of a table."""
    before: Any
    after: Any
    """The indices of the examples beside it."""
    moved: MovedAnswers | PendingWork | None
    learned: LearnedOverTime | PendingWork | None
    neighbours: Neighbours | PendingWork | None
    visits: list[dict[str, Any]]
    columns: list[str]
    selected: int
    count: int
    notes: list[str]
    target: str
    """What it adds to, in words."""


def training_example(explorer: Explorer, index: int) -> ExampleView:
    """The page of one training example."""
    examples = training_examples(explorer)
    if index not in examples.place:
        raise QueryError(f"there is no training example {index}.")
    number = examples.place[index]
    choice = settle_choice(explorer, TrainingSetQuestion())
    line = _line(explorer, choice, number)
    place = ExamplePlace("train", index) if explorer.trained_on(index) is not None else None
    notes: list[str] = []
    moved = learned = None
    if line.visits:
        try:
            moved = None if explorer.test is None else moved_answers(explorer, choice, index)
            learned = None if place is None else learned_over_time(explorer, place, line)
        except QueryError as error:
            notes.append(f"What it adds is not known: {error}")
    visits = explorer.memory.visits
    columns = [name for name in visits.column_names if name not in ("visit", "row", explorer.index)]
    places = np.flatnonzero(examples.place_of_visit == number)[:MOST_VISITS]
    names = examples.names
    return ExampleView(
        line=line,
        asked_at=place,
        says=[] if place is None else explorer.says(need_logits(explorer.predict(place))[0], SAID),
        names=feature_names(explorer),
        features=tuple(zip(feature_names(explorer), line.features, strict=False)),
        before=names[number - 1] if number else None,
        after=names[number + 1] if number + 1 < len(names) else None,
        moved=moved,
        learned=learned,
        neighbours=None if place is None else neighbours_of(explorer, index),
        visits=visits.take(places).select(columns).to_pylist(),
        columns=columns,
        selected=len(explorer.selected),
        count=len(examples),
        notes=notes,
        target=right_target(explorer),
    )


def _line(explorer: Explorer, choice: TrainingSetQuestion, number: int) -> ExampleLine:
    """The example with what has been computed already; nothing is started for it."""
    return lines_of(explorer, training_table(explorer, choice, start=False), [number])[0]
