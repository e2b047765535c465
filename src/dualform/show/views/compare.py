"""Two networks side by side: two steps of a training, or two memories of the same network."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.errors import QueryError
from dualform.explain import Memory
from dualform.progress import Progress

from ..examples import ShownExample
from ..text import need_logits
from .explorer import BATCH, ExampleHeader, ExamplePlace, Explorer
from .prediction import PredictionQuestion, PredictionView, predict
from .work import PendingWork

SHOWN, ROWS, MOST_ROWS, CHANGED = 5, 200, 5000, 24
"""Training examples of each side; test examples that are compared, at most; and changed answers that are shown."""


@dataclass(frozen=True)
class CompareQuestion:
    """Two steps of this memory; or the last step of this one and a step of another one."""

    left: int | None = None
    right: int | None = None
    other: str | None = None
    """The name of another memory, on the right."""
    rows: int = ROWS


@dataclass(frozen=True)
class ComparedSide:
    """One of the two networks."""

    name: str
    step: int
    steps: int
    view: PredictionView | None
    pending: PendingWork | None


@dataclass(frozen=True)
class ChangedAnswer:
    """A test example that the two networks answer differently."""

    row: int
    shown: ShownExample
    label: str | None
    left: str
    right: str
    left_is_right: bool
    right_is_right: bool


@dataclass(frozen=True)
class AnswersOfBoth:
    """The answers to many examples, counted."""

    compared: int
    left_right: float | None
    right_right: float | None
    """The shares of right answers; None without labels."""
    changed: int
    shown: list[ChangedAnswer]


@dataclass(frozen=True)
class CompareView(ExampleHeader):
    """Everything the page shows."""

    asking: CompareQuestion
    others: list[str]
    left: ComparedSide
    right: ComparedSide
    shared: int
    """How many of the shown training examples are the same on both sides."""
    answers: AnswersOfBoth | PendingWork


def compare(explorer: Explorer, place: ExamplePlace, question: CompareQuestion) -> CompareView:
    """What two networks say about an example, and where else they differ."""
    explorer.need(place)
    other = explorer if question.other is None else explorer.others.get(question.other)
    if other is None:
        raise QueryError(f"there is no memory '{question.other}' to compare with: there are {list(explorer.others)}.")
    if question.rows < 1:
        raise QueryError(f"rows={question.rows} examples cannot be compared: choose 1 or more.")
    steps = explorer.memory.step
    halfway = max(1, steps // 2)
    left = question.left if question.left is not None else steps if question.other else halfway
    right = question.right if question.right is not None else other.memory.step
    asking = CompareQuestion(left, right, question.other, min(question.rows, MOST_ROWS, explorer.count(place.set)))
    sides = _side(explorer, place, left, explorer.title), _side(other, place, right, other.title)
    named = [
        {example.index for example in side.view.examples or ()} if side.view is not None else set() for side in sides
    ]
    return CompareView(
        **explorer.about(place),
        asking=asking,
        others=list(explorer.others),
        left=sides[0],
        right=sides[1],
        shared=len(named[0] & named[1]),
        answers=_answers(explorer, other, place.set, asking),
    )


def _side(explorer: Explorer, place: ExamplePlace, step: int, name: str) -> ComparedSide:
    view = predict(explorer, place, PredictionQuestion(step=step, k=SHOWN))
    if isinstance(view, PendingWork):
        return ComparedSide(name, step, explorer.memory.step, None, view)
    return ComparedSide(name, step, explorer.memory.step, view, view.pending)


def _answers(
    explorer: Explorer, other: Explorer, set_name: str, question: CompareQuestion
) -> AnswersOfBoth | PendingWork:  # fmt: skip
    assert question.left is not None and question.right is not None
    memories = []
    for one, step in ((explorer, question.left), (other, question.right)):
        memory = one.at(step)
        if isinstance(memory, PendingWork):
            return memory
        memories.append(memory)
    count = explorer.count(set_name)
    examples = explorer.examples(set_name)
    stride = 1 if examples is None else examples.stride
    rows = list(range(0, count, stride))[: question.rows]

    def work(progress: Progress) -> tuple[Tensor, Tensor]:
        sides = zip((explorer.fork(), other.fork()), memories, strict=True)
        first, second = (_classes(one, memory, set_name, rows) for one, memory in sides)
        return first, second

    key = ("compared", set_name, question.left, question.right, question.other, len(rows))
    seconds = 2 * explorer.forward_seconds(len(rows))
    found = explorer.work_queue.result(key, f"the answers to {len(rows):,} examples", seconds, work)
    if isinstance(found, PendingWork):
        return found
    return _counted(explorer, set_name, rows, *(classes.tolist() for classes in found))


def _classes(explorer: Explorer, memory: Memory, set_name: str, rows: Sequence[int]) -> Tensor:
    """The answers of a network to some examples."""
    parts = []
    for begin in range(0, len(rows), BATCH):
        inputs = explorer.inputs(set_name, rows[begin : begin + BATCH])
        parts.append(need_logits(explorer.spot(memory, inputs).prediction).argmax(1))
    return torch.cat(parts)


def _counted(
    explorer: Explorer, set_name: str, rows: Sequence[int], left: Sequence[int], right: Sequence[int]
) -> AnswersOfBoth:  # fmt: skip
    labels = [explorer.label(ExamplePlace(set_name, row)) for row in rows]
    known = [i for i, label in enumerate(labels) if label is not None]
    shares = [sum(answers[i] == labels[i] for i in known) / len(known) if known else None for answers in (left, right)]
    changed = [i for i in range(len(rows)) if left[i] != right[i]]
    shown = [
        ChangedAnswer(
            rows[i], explorer.shown(ExamplePlace(set_name, rows[i])),
            None if (label := labels[i]) is None else explorer.class_name(label),
            explorer.class_name(left[i]), explorer.class_name(right[i]), left[i] == labels[i], right[i] == labels[i],
        )
        for i in changed[:CHANGED]
    ]  # fmt: skip
    return AnswersOfBoth(len(rows), shares[0], shares[1], len(changed), shown)
