"""The training set: which examples matter most over a test set, which hardly matter, and which look wrong."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError
from dualform.progress import Progress

from ..examples import ShownExample
from .explorer import BATCH, Explorer
from .work import PendingWork

FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")

Correctness = Literal["all", "right", "wrong"]
SHOWN, MOST = 24, 5000
"""Training examples shown of each kind, and the most test examples that they are weighed over."""


@dataclass(frozen=True)
class TrainingSetQuestion:
    """The controls of the page: which test examples, and which layer."""

    layer: str | None = None
    which: Correctness = "all"
    rows: int = 200


@dataclass(frozen=True)
class ExampleTotal:
    """What one training example adds to the right answers of all test examples together."""

    index: Any
    shown: ShownExample | None
    label: Any
    adds: float
    """The sum of its contributions."""
    size: float
    """The sum of their absolute values: how much it matters, for good or ill."""
    against: float
    """What it takes from the right answers of test examples with another label than its own."""
    visits: int


@dataclass(frozen=True)
class ExampleSums:
    """The totals of all training examples, one entry each."""

    names: tuple[Any, ...]
    adds: Float[Tensor, " G"]
    size: Float[Tensor, " G"]
    against: Float[Tensor, " G"] | None
    test_examples: int
    right: float | None
    wrong: list[tuple[int, int]]
    """Test examples that the network gets wrong, each with the predicted class."""


@dataclass(frozen=True)
class Misprediction:
    """A test example that the network gets wrong."""

    row: int
    shown: ShownExample
    label: str
    says: str


@dataclass(frozen=True)
class TrainingSetView:
    """Everything the page shows."""

    choice: TrainingSetQuestion
    layers: list[str]
    asked: int
    available: int
    right: float | None
    target: str
    most: list[ExampleTotal]
    least: list[ExampleTotal]
    never: list[ExampleTotal]
    suspects: list[ExampleTotal] | None
    """None if the right labels are not known."""
    mistakes: list[Misprediction]
    count: int
    pending: PendingWork | None


def training_set(explorer: Explorer, choice: TrainingSetQuestion) -> TrainingSetView:
    """The training examples, weighed over some test examples."""
    choice, test = settle_choice(explorer, choice), explorer.test
    assert test is not None
    sums = sums_of(explorer, choice)
    labelled = test.labels is not None and not test.is_stream
    target = "the logit of the true class" if labelled else "the logit of the predicted class"
    if isinstance(sums, PendingWork):
        return TrainingSetView(choice, list(explorer.layers), 0, len(test), None, target, [], [], [], None, [], 0, sums)
    order = sums.adds.argsort(descending=True).tolist()
    quiet = sums.size.argsort().tolist()
    suspects = None if sums.against is None else sums.against.argsort(descending=True).tolist()
    return TrainingSetView(
        choice=choice,
        layers=list(explorer.layers),
        asked=sums.test_examples,
        available=len(test),
        right=sums.right,
        target=target,
        most=_totals_of(explorer, sums, [i for i in order[:SHOWN] if sums.adds[i] > 0]),
        least=_totals_of(explorer, sums, [i for i in order[::-1][:SHOWN] if sums.adds[i] < 0]),
        never=_totals_of(explorer, sums, quiet[:SHOWN]),
        suspects=None if suspects is None else _totals_of(explorer, sums, suspects[:SHOWN]),
        mistakes=[_mistake(explorer, row, predicted) for row, predicted in sums.wrong[:SHOWN]],
        count=len(sums.names),
        pending=None,
    )


def settle_choice(explorer: Explorer, choice: TrainingSetQuestion) -> TrainingSetQuestion:
    """The choice with a layer, limited to the test examples that exist."""
    if explorer.test is None:
        raise QueryError("there is no test set to weigh training examples over: give one with --test.")
    if choice.rows < 1:
        raise QueryError(f"training examples cannot be weighed over {choice.rows} test examples: choose 1 or more.")
    layer = choice.layer or explorer.layers[-1]
    return TrainingSetQuestion(layer, choice.which, min(choice.rows, MOST, len(explorer.test)))


def suspects_csv(explorer: Explorer, choice: TrainingSetQuestion) -> str | PendingWork:
    """All training examples as a CSV table, the most suspicious first."""
    sums = sums_of(explorer, settle_choice(explorer, choice))
    if isinstance(sums, PendingWork):
        return sums
    if sums.against is None:
        raise QueryError("the test set has no labels, so the right answers are not known.")
    text = StringIO()
    table = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    table.writerow([explorer.index, "label", "against other labels", "adds in sum", "size", "visits"])
    for total in _totals_of(explorer, sums, sums.against.argsort(descending=True).tolist(), pictures=False):
        table.writerow([_cell(total.index), _cell(total.label), total.against, total.adds, total.size, total.visits])
    return text.getvalue()


def sums_of(explorer: Explorer, choice: TrainingSetQuestion) -> ExampleSums | PendingWork:
    """The totals of all training examples, cached; pending work if they take long."""
    layer, column = choice.layer or explorer.layers[-1], explorer.index
    if column not in explorer.memory.store.visits.column_names:
        raise QueryError(f"the visits do not say which example they were of: note a column '{column}' while recording.")
    info = explorer.info(layer)
    if info.keep != "slots":
        raise QueryError(f"layer '{layer}' kept no slots, so single training examples cannot be weighed through it.")

    def work(progress: Progress) -> ExampleSums:
        return _sum_over_batches(explorer.fork(), TrainingSetQuestion(layer, choice.which, choice.rows), progress)

    seconds = explorer.scan_seconds(layer, "contribution", choice.rows)
    title = f"what all training examples add to {choice.rows} test examples"
    return explorer.work_queue.result(("training", layer, choice.which, choice.rows), title, seconds, work)


def _sum_over_batches(explorer: Explorer, choice: TrainingSetQuestion, progress: Progress) -> ExampleSums:
    test = explorer.test
    assert test is not None and choice.layer is not None
    rows = list(range(0, len(test), test.stride))[: choice.rows]
    labels = None if test.is_stream or test.labels is None else [test.label(row) for row in rows]
    rows, right, wrong = _rows_to_weigh(explorer, rows, labels, choice.which)
    own_labels = explorer.own_labels
    names: tuple[Any, ...] = ()
    adds = size = against = torch.zeros(0, dtype=torch.float64)
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        true = None if labels is None else torch.tensor([test.label(row) or 0 for row in batch])
        spot = explorer.spot(explorer.memory, explorer.inputs("test", batch), true)
        groups = spot.by(explorer.index, layer=choice.layer, progress=_batch_progress(progress, start, len(rows)))
        values = groups.values + (groups.bias if groups.bias is not None else 0)
        if not names:
            names = groups.names
            adds, size, against = (torch.zeros(len(names), dtype=torch.float64) for _ in range(3))
        adds += values.sum(0)
        size += values.abs().sum(0)
        if own_labels and true is not None:
            is_other_class = true.unsqueeze(1) != torch.tensor([own_labels.get(name, -1) for name in names])
            against -= (values * is_other_class).sum(0)
    if not names:
        raise QueryError(f"none of the first {choice.rows} test examples is {choice.which}.")
    judged = bool(own_labels) and labels is not None
    return ExampleSums(names, adds, size, against if judged else None, len(rows), right, wrong)


def _rows_to_weigh(
    explorer: Explorer, rows: Sequence[int], labels: list[int | None] | None, correctness: Correctness
) -> tuple[list[int], float | None, list[tuple[int, int]]]:
    """The rows to weigh over (all, or those that are right or wrong), the share that is right, and the mistakes."""
    if labels is None:
        return list(rows), None, []
    answers = explorer.logits("test", rows).argmax(1).tolist()
    right = [answer == label for answer, label in zip(answers, labels, strict=True)]
    share = sum(right) / len(right)
    wrong = [(row, answer) for row, answer, is_right in zip(rows, answers, right, strict=True) if not is_right]
    if correctness == "all":
        return list(rows), share, wrong
    return (
        [row for row, is_right in zip(rows, right, strict=True) if is_right == (correctness == "right")],
        share,
        wrong,
    )


def _mistake(explorer: Explorer, row: int, predicted: int) -> Misprediction:
    assert explorer.test is not None
    label = explorer.class_name(explorer.test.label(row) or 0)
    return Misprediction(row, explorer.test.shown(row, name="test example"), label, explorer.class_name(predicted))


def _totals_of(
    explorer: Explorer, sums: ExampleSums, numbers: Sequence[int], pictures: bool = True
) -> list[ExampleTotal]:
    counts, own_labels = explorer.counts(explorer.index), explorer.own_labels
    totals = []
    for number in numbers:
        index = sums.names[number]
        shown = explorer.trained_on(index) if pictures else None
        against = float("nan") if sums.against is None else float(sums.against[number])
        totals.append(
            ExampleTotal(
                index,
                shown,
                own_labels.get(index),
                float(sums.adds[number]),
                float(sums.size[number]),
                against,
                counts.get(index, 0),
            )
        )
    return totals


def _batch_progress(progress: Progress, begin: int, total: int) -> Progress:
    """Progress within one batch, shown as progress over all batches."""
    if isinstance(progress, bool):
        return progress

    def show_batch(stage: str, done: int, batch_total: int) -> None:
        progress(stage, int(1000 * (begin + min(BATCH, total - begin) * done / max(1, batch_total)) / total), 1000)

    return show_batch


def _cell(value: Any) -> Any:
    """A value that a spreadsheet does not take for a formula."""
    return f"'{value}" if isinstance(value, str) and value.strip()[:1] in FORMULA else value
