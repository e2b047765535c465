"""What each training example adds to the answers about the test set, summed over the test examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError
from dualform.explain import Groups, Spotlight
from dualform.progress import Progress

from ...examples import ShownExample
from ..explorer import BATCH, Explorer
from ..work import PendingWork
from .examples import trained_label
from .question import Correctness, TrainingSetQuestion

KEPT = 1 << 24
"""The most single contributions (test examples × training examples) that are kept beside their sums."""

SWEEP_BATCH = 4 * BATCH
"""How many test examples are asked about together where every pass is a sweep through all of training."""


@dataclass(frozen=True)
class ExampleSums:
    """The totals of all training examples, one entry each."""

    names: tuple[Any, ...]
    adds: Float[Tensor, " G"]
    """The sum of its contributions."""
    size: Float[Tensor, " G"]
    """The sum of their absolute values: how much it matters, for good or ill."""
    against: Float[Tensor, " G"] | None
    """What it takes from the right answers of test examples with another label than its own."""
    test_rows: list[int]
    right: float | None
    wrong: list[tuple[int, int]]
    """Test examples that the network gets wrong, each with the predicted class."""
    single: Float[Tensor, "n G"] | None = None
    """The contributions themselves, unless they are too many."""
    left_out: tuple[str, ...] = ()
    """Layers whose slots were not kept, so that they do not count."""


@dataclass(frozen=True)
class Misprediction:
    """A test example that the network gets wrong."""

    row: int
    shown: ShownExample
    label: str
    says: str


def sums_of(explorer: Explorer, choice: TrainingSetQuestion) -> ExampleSums | PendingWork:
    """The totals of all training examples, cached; pending work if they take long."""
    if explorer.test is None:
        raise QueryError("there is no test set to weigh training examples over: give one with --test.")
    if explorer.index not in explorer.memory.store.visits.column_names:
        raise QueryError(
            f"the visits do not say which example they were of: note a column '{explorer.index}' while recording."
        )
    layers = asked_layers(explorer, choice.layer)

    def work(progress: Progress) -> ExampleSums:
        return _sum_over_batches(explorer.fork(), choice, progress)

    batch = _batch_size(explorer, layers)
    seconds = ceil(choice.rows / batch) * explorer.sums_seconds(choice.layer, explorer.index, min(choice.rows, batch))
    title = f"what all training examples add to {choice.rows} test examples"
    key = ("training", choice.layer, choice.which, choice.rows)
    return explorer.work_queue.result(key, title, seconds, work)


def known_sums(explorer: Explorer, choice: TrainingSetQuestion) -> ExampleSums | None:
    """The totals if they have been computed."""
    return next(iter(explorer.work_queue.latest("training", choice.layer, choice.which, choice.rows)), None)


def asked_layers(explorer: Explorer, layer: str | None) -> list[str]:
    """The layers through which single training examples can be weighed; an error if there is none."""
    if layer is not None and explorer.info(layer).keep != "slots":
        raise QueryError(f"layer '{layer}' kept no slots, so single training examples cannot be weighed through it.")
    layers = [name for name in explorer.layers if explorer.info(name).keep == "slots"] if layer is None else [layer]
    if not layers:
        raise QueryError("no layer kept slots, so single training examples cannot be weighed.")
    return layers


def network_seconds(explorer: Explorer, layers: Sequence[str], queries: int) -> float:
    """Estimated seconds to ask some layers together about some examples."""
    return sum(explorer.scan_seconds(layer, "contribution", queries) for layer in layers)


def right_target(explorer: Explorer) -> str:
    """The number that training examples add to, in words."""
    return "the logit of the true class" if is_labelled(explorer) else "the logit of the predicted class"


def is_labelled(explorer: Explorer) -> bool:
    """Whether the right answers to the test examples are known."""
    return explorer.test is not None and explorer.test.labels is not None and not explorer.test.is_stream


def right_answers(explorer: Explorer, rows: Sequence[int]) -> Tensor | None:
    """The labels of some test examples as targets; None if they are not known, and the predicted class is explained."""
    if not is_labelled(explorer) or explorer.outputs == 1:
        return None
    assert explorer.test is not None
    return torch.tensor([explorer.test.label(row) or 0 for row in rows])


def test_rows(explorer: Explorer, count: int) -> list[int]:
    """The first test examples that do not overlap."""
    assert explorer.test is not None
    return list(range(0, len(explorer.test), explorer.test.stride))[:count]


def mistakes_of(explorer: Explorer, sums: ExampleSums, shown: int) -> list[Misprediction]:
    """The first test examples that the network gets wrong."""
    assert explorer.test is not None
    return [
        Misprediction(
            row,
            explorer.test.shown(row, name="test example"),
            explorer.class_name(explorer.test.label(row) or 0),
            explorer.class_name(predicted),
        )
        for row, predicted in sums.wrong[:shown]
    ]


def _batch_size(explorer: Explorer, layers: Sequence[str]) -> int:
    return SWEEP_BATCH if any(explorer.is_swept(layer) for layer in layers) else BATCH


def _sum_over_batches(explorer: Explorer, choice: TrainingSetQuestion, progress: Progress) -> ExampleSums:
    rows, right, wrong = _rows_to_weigh(explorer, test_rows(explorer, choice.rows), choice.which)
    if not rows:
        raise QueryError(f"none of the first {choice.rows} test examples is {choice.which}.")
    trained = torch.zeros(0)
    size = _batch_size(explorer, asked_layers(explorer, choice.layer))
    names: tuple[Any, ...] = ()
    left_out: tuple[str, ...] = ()
    parts: list[Tensor] = []
    adds = sizes = against = torch.zeros(0, dtype=torch.float64)
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        true = right_answers(explorer, batch)
        spot = explorer.spot(explorer.memory, explorer.inputs("test", batch), true)
        watch = _batch_progress(progress, start, len(batch), len(rows))
        groups = _groups(explorer, spot, choice.layer, watch)
        values = groups.values + (groups.bias if groups.bias is not None else 0)
        if not names:
            names, left_out = groups.names, groups.left_out
            adds, sizes, against = (torch.zeros(len(names), dtype=torch.float64) for _ in range(3))
            trained = torch.tensor([_class_number(trained_label(explorer, name)) for name in names])
        adds += values.sum(0)
        sizes += values.abs().sum(0)
        if true is not None:
            against -= (values * (true.unsqueeze(1) != trained)).sum(0)
        if len(rows) * len(names) <= KEPT:
            parts.append(values.float())
    judged = right is not None and bool((trained >= 0).any())
    single = torch.cat(parts) if parts else None
    return ExampleSums(names, adds, sizes, against if judged else None, rows, right, wrong, single, left_out)


def _groups(explorer: Explorer, spot: Spotlight, layer: str | None, progress: Progress) -> Groups:
    """The sums of all examples. The question for a top example beside it makes a sweep of what would be one copy of the
    weights for each example.
    """
    if any(map(explorer.is_swept, asked_layers(explorer, layer))):
        per = "example" if layer is None else "slot"
        return spot.ask(layer, top=1, per=per, by=(explorer.index,), progress=progress).groups[explorer.index]
    return spot.by(explorer.index, layer=layer, progress=progress)


def _class_number(label: Any) -> int:
    return label if isinstance(label, int) else -1


def _rows_to_weigh(
    explorer: Explorer, rows: list[int], correctness: Correctness
) -> tuple[list[int], float | None, list[tuple[int, int]]]:
    """The rows to weigh over (all, or those that are right or wrong), the share that is right, and the mistakes."""
    labels = right_answers(explorer, rows)
    if labels is None:
        return rows, None, []
    answers = explorer.logits("test", rows).argmax(1)
    is_right = (answers == labels).tolist()
    wrong = [(row, answer) for row, answer, right in zip(rows, answers.tolist(), is_right, strict=True) if not right]
    if correctness != "all":
        rows = [row for row, right in zip(rows, is_right, strict=True) if right == (correctness == "right")]
    return rows, sum(is_right) / len(is_right), wrong


def _batch_progress(progress: Progress, begin: int, size: int, total: int) -> Progress:
    """Progress within one batch, shown as progress over all batches."""
    if isinstance(progress, bool):
        return progress

    def show_batch(stage: str, done: int, batch_total: int) -> None:
        progress(stage, int(1000 * (begin + size * done / max(1, batch_total)) / total), 1000)

    return show_batch
