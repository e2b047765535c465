"""The training set: which examples matter most over a test set, which never do, and which look wrong."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError

from ..examples import ShownExample
from .explorer import BATCH, Explorer
from .work import PendingWork, Tell

FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")

Correctness = Literal["all", "right", "wrong"]
SHOWN, MOST = 24, 5000
"""Examples of each kind, and test examples that are asked about at most."""


@dataclass(frozen=True)
class TrainingSetQuestion:
    """Over which test examples, and through which layer."""

    layer: str | None = None
    which: Correctness = "all"
    rows: int = 200


@dataclass(frozen=True)
class ExampleTotal:
    """What a training example adds to the right answers of all test examples together."""

    index: Any
    shown: ShownExample | None
    label: Any
    adds: float
    """In sum."""
    size: float
    """Σ|what it adds|: how much it matters, for good or ill."""
    against: float
    """What it takes from the right answers of test examples that have another label than its own."""
    visits: int


@dataclass(frozen=True)
class ExampleSums:
    """The numbers of all training examples."""

    names: tuple[Any, ...]
    adds: Float[Tensor, " G"]
    size: Float[Tensor, " G"]
    against: Float[Tensor, " G"] | None
    asked: int
    right: float | None
    wrong: list[tuple[int, int]]
    """Test examples that the network gets wrong, each with what it says."""


@dataclass(frozen=True)
class Misprediction:
    """A test example that the network gets wrong."""

    row: int
    shown: ShownExample
    label: str
    says: str


@dataclass(frozen=True)
class TrainingSetView:
    """All that the page shows."""

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
    """None where it is not known which label is right."""
    mistakes: list[Misprediction]
    count: int
    pending: PendingWork | None


def training_set(explorer: Explorer, choice: TrainingSetQuestion) -> TrainingSetView:
    """Weigh the training examples over some test examples."""
    choice, test = settle(explorer, choice), explorer.test
    assert test is not None
    found = sums_of(explorer, choice)
    labelled = test.labels is not None and not test.is_stream
    target = "the logit of the true class" if labelled else "the logit of the predicted class"
    if isinstance(found, PendingWork):
        return TrainingSetView(
            choice, list(explorer.layers), 0, len(test), None, target, [], [], [], None, [], 0, found
        )
    order = found.adds.argsort(descending=True).tolist()
    quiet = found.size.argsort().tolist()
    suspects = None if found.against is None else found.against.argsort(descending=True).tolist()
    return TrainingSetView(
        choice=choice,
        layers=list(explorer.layers),
        asked=found.asked,
        available=len(test),
        right=found.right,
        target=target,
        most=_weighed(explorer, found, [i for i in order[:SHOWN] if found.adds[i] > 0]),
        least=_weighed(explorer, found, [i for i in order[::-1][:SHOWN] if found.adds[i] < 0]),
        never=_weighed(explorer, found, quiet[:SHOWN]),
        suspects=None if suspects is None else _weighed(explorer, found, suspects[:SHOWN]),
        mistakes=[_mistake(explorer, row, said) for row, said in found.wrong[:SHOWN]],
        count=len(found.names),
        pending=None,
    )


def settle(explorer: Explorer, choice: TrainingSetQuestion) -> TrainingSetQuestion:
    """The choice with a layer, and no more test examples than there are."""
    if explorer.test is None:
        raise QueryError("there is no test set to weigh training examples by: give one with --test.")
    if choice.rows < 1:
        raise QueryError(f"{choice.rows} test examples are none to weigh by: choose 1 or more.")
    layer = choice.layer or explorer.layers[-1]
    return TrainingSetQuestion(layer, choice.which, min(choice.rows, MOST, len(explorer.test)))


def suspects_csv(explorer: Explorer, choice: TrainingSetQuestion) -> str | PendingWork:
    """All training examples as a table, the most suspicious first."""
    found = sums_of(explorer, settle(explorer, choice))
    if isinstance(found, PendingWork):
        return found
    if found.against is None:
        raise QueryError("the test set has no labels, so it is not known which answers are right.")
    text = StringIO()
    table = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    table.writerow([explorer.index, "label", "against other labels", "adds in sum", "size", "visits"])
    for each in _weighed(explorer, found, found.against.argsort(descending=True).tolist(), pictures=False):
        table.writerow([_cell(each.index), _cell(each.label), each.against, each.adds, each.size, each.visits])
    return text.getvalue()


def sums_of(explorer: Explorer, choice: TrainingSetQuestion) -> ExampleSums | PendingWork:
    """The sums of all training examples, kept when they are found."""
    layer, column = choice.layer or explorer.layers[-1], explorer.index
    if column not in explorer.memory.store.visits.column_names:
        raise QueryError(f"the visits do not say which example they were of: note a column '{column}' while recording.")
    info = explorer.info(layer)
    if info.keep != "slots":
        raise QueryError(f"layer '{layer}' kept no slots, so single training examples cannot be weighed by it.")

    def work(tell: Tell) -> ExampleSums:
        return _sums(explorer.fork(), TrainingSetQuestion(layer, choice.which, choice.rows), tell)

    seconds = explorer.scanning(layer, "contribution", choice.rows)
    what = f"what all training examples add to {choice.rows} test examples"
    return explorer.desk.need(("training", layer, choice.which, choice.rows), what, seconds, work)


def _sums(explorer: Explorer, choice: TrainingSetQuestion, tell: Tell) -> ExampleSums:
    test = explorer.test
    assert test is not None and choice.layer is not None
    rows = list(range(0, len(test), test.stride))[: choice.rows]
    labels = None if test.is_stream or test.labels is None else [test.label(row) for row in rows]
    rows, right, wrong = _chosen(explorer, rows, labels, choice.which)
    own = explorer.own_labels
    names: tuple[Any, ...] = ()
    adds = size = against = torch.zeros(0, dtype=torch.float64)
    for begin in range(0, len(rows), BATCH):
        some = rows[begin : begin + BATCH]
        true = None if labels is None else torch.tensor([test.label(row) or 0 for row in some])
        spot = explorer.spot(explorer.memory, explorer.inputs("test", some), true)
        groups = spot.by(explorer.index, layer=choice.layer, progress=_part(tell, begin, len(rows)))
        values = groups.values + (groups.bias if groups.bias is not None else 0)
        if not names:
            names = groups.names
            adds, size, against = (torch.zeros(len(names), dtype=torch.float64) for _ in range(3))
        adds += values.sum(0)
        size += values.abs().sum(0)
        if own and true is not None:
            other = true.unsqueeze(1) != torch.tensor([own.get(name, -1) for name in names])
            against -= (values * other).sum(0)
    if not names:
        raise QueryError(f"none of the first {choice.rows} test examples is {choice.which}.")
    known = bool(own) and labels is not None
    return ExampleSums(names, adds, size, against if known else None, len(rows), right, wrong)


def _chosen(
    explorer: Explorer, rows: Sequence[int], labels: list[int | None] | None, which: Correctness
) -> tuple[list[int], float | None, list[tuple[int, int]]]:
    """The test examples that the network gets right, or wrong; the share that it gets right; and its mistakes."""
    if labels is None:
        return list(rows), None, []
    answers = explorer.logits("test", rows).argmax(1).tolist()
    right = [answer == label for answer, label in zip(answers, labels, strict=True)]
    share = sum(right) / len(right)
    wrong = [(row, answer) for row, answer, fine in zip(rows, answers, right, strict=True) if not fine]
    if which == "all":
        return list(rows), share, wrong
    return [row for row, fine in zip(rows, right, strict=True) if fine == (which == "right")], share, wrong


def _mistake(explorer: Explorer, row: int, said: int) -> Misprediction:
    assert explorer.test is not None
    label = explorer.class_name(explorer.test.label(row) or 0)
    return Misprediction(row, explorer.test.shown(row, name="test example"), label, explorer.class_name(said))


def _weighed(explorer: Explorer, sums: ExampleSums, which: Sequence[int], pictures: bool = True) -> list[ExampleTotal]:
    counts, own = explorer.counts(explorer.index), explorer.own_labels
    found = []
    for i in which:
        index = sums.names[i]
        shown = explorer.trained_on(index) if pictures else None
        against = float("nan") if sums.against is None else float(sums.against[i])
        found.append(
            ExampleTotal(
                index, shown, own.get(index), float(sums.adds[i]), float(sums.size[i]), against, counts.get(index, 0)
            )
        )
    return found


def _part(tell: Tell, begin: int, total: int) -> Tell:
    """Progress of one batch, as a part of all."""
    if isinstance(tell, bool):
        return tell

    def told(what: str, done: int, of: int) -> None:
        tell(what, int(1000 * (begin + min(BATCH, total - begin) * done / max(1, of)) / total), 1000)

    return told


def _cell(value: Any) -> Any:
    """A value that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value.strip()[:1] in FORMULA else value
