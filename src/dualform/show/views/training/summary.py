"""The training set in a few tiles, for the report."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...examples import ShownExample
from ..explorer import Explorer
from ..work import PendingWork
from .question import TrainingSetQuestion, settle_choice
from .sums import ExampleSums, right_target, sums_of

SHOWN = 24
"""Training examples shown of each kind."""


@dataclass(frozen=True)
class ExampleTotal:
    """What one training example adds to the right answers of all test examples together."""

    index: Any
    shown: ShownExample | None
    label: Any
    adds: float
    size: float
    against: float
    visits: int


@dataclass(frozen=True)
class TrainingSummary:
    """The training examples at both ends."""

    choice: TrainingSetQuestion
    asked: int
    target: str
    most: list[ExampleTotal]
    least: list[ExampleTotal]
    never: list[ExampleTotal]
    suspects: list[ExampleTotal] | None
    """Those that take most from other labels; None if the right labels are not known."""
    count: int


def training_summary(explorer: Explorer, choice: TrainingSetQuestion) -> TrainingSummary | PendingWork:
    """The examples that add most, take most away, hardly matter, and take most from other labels."""
    choice = settle_choice(explorer, choice)
    sums = sums_of(explorer, choice)
    if isinstance(sums, PendingWork):
        return sums

    def totals(values: Tensor, condition: Tensor | None = None) -> list[ExampleTotal]:
        best = values.argsort(descending=True).tolist()[:SHOWN]
        return [_total(explorer, sums, place) for place in best if condition is None or condition[place]]

    return TrainingSummary(
        choice,
        len(sums.test_rows),
        right_target(explorer),
        totals(sums.adds, sums.adds > 0),
        totals(-sums.adds, sums.adds < 0),
        totals(-sums.size),
        None if sums.against is None else totals(sums.against),
        len(sums.names),
    )


def _total(explorer: Explorer, sums: ExampleSums, place: int) -> ExampleTotal:
    index = sums.names[place]
    return ExampleTotal(
        index,
        explorer.trained_on(index),
        explorer.own_labels.get(index),
        float(sums.adds[place]),
        float(sums.size[place]),
        float("nan") if sums.against is None else float(sums.against[place]),
        explorer.counts(explorer.index).get(index, 0),
    )
