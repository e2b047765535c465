"""What if: the network without some of its training, beside the network as it is."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...examples import ShownExample
from ...text import MASKED, need_logits
from ..explorer import MANY, ClassScore, ExampleHeader, ExamplePlace, Explorer
from ..prediction import PredictionQuestion, label_name, name_of, predict
from ..work import PendingWork
from .direct import masked_weights
from .masks import WhatIfMasks, edges_of, hidden_by
from .run_again import RunAgain, named_logits, run_again

SHOWN_CLASSES = 10
"""How many classes are shown."""

OFFERED = 12
"""How many training examples are offered for masking."""

REMOVED = "direct contribution removed, not retrained"


@dataclass(frozen=True)
class GroupBox:
    """The check box of one group."""

    value: str
    name: str
    visits: int
    ticked: bool


@dataclass(frozen=True)
class MaskedExample:
    """A training example that is masked, or offered for masking."""

    index: int
    shown: ShownExample | None
    label: str | None
    ticked: bool


@dataclass(frozen=True)
class CounterfactualAnswer:
    """What the network says without some training, found in one of three ways."""

    name: str
    meaning: str
    scores: list[ClassScore] | None
    """In the order of what it says as trained; None if it is not known."""
    changes: list[float]
    """How much each of these logits changes."""
    answer: str
    """The class that it says."""
    changed: bool
    pending: PendingWork | None
    reason: str
    """Why it is not known."""


@dataclass(frozen=True)
class WhatIfView(ExampleHeader):
    """Everything the page shows."""

    says: list[ClassScore]
    answers: list[CounterfactualAnswer]
    """Direct, predicted, retrained; empty if nothing is masked."""
    best: CounterfactualAnswer | None
    """The one of them that can be trusted most."""
    hidden: int
    visits: int
    masks: WhatIfMasks
    boxes: list[GroupBox]
    columns: list[str]
    edges: list[int]
    examples: list[MaskedExample]
    selected: int
    """How many examples visitors selected."""
    note: str
    caveat: str
    problems: dict[str, str]
    """Why part of what was asked for is not masked, by the field of the form."""

    @property
    def without(self) -> list[ClassScore] | None:
        """What the network says with the direct contributions removed."""
        return self.answers[0].scores if self.answers else None

    @property
    def changed(self) -> bool:
        """Whether removing the direct contributions changes the answer."""
        return bool(self.answers) and self.answers[0].changed

    @property
    def pending(self) -> PendingWork | None:
        """The work that the direct answer waits for."""
        return self.answers[0].pending if self.answers else None


def what_if(explorer: Explorer, place: ExamplePlace, masks: WhatIfMasks, *, again: bool = True) -> WhatIfView:
    """What the network predicts for an example with and without some of its training.

    With ``again`` it is also predicted and tried by training again, where that is possible.
    """
    explorer.need(place)
    memory = explorer.memory
    columns = [name for name in explorer.columns if len(explorer.groups(name)) <= MANY]
    by = masks.by if masks.by in columns else columns[0] if columns else explorer.columns[0]
    masks = masks.bounded(memory.step)
    hidden = hidden_by(explorer, masks, by)
    logits = need_logits(explorer.predict(place))[0]
    direct = predicted = retrained = None
    runs = RunAgain()
    if hidden.visits.any():
        masked = masked_weights(explorer, masks, by, hidden.visits)
        direct = masked if isinstance(masked, PendingWork) else need_logits(explorer.predict_with(masked, place))[0]
        if again:
            key = (by, masks, masks.all_examples(explorer))
            runs = run_again(explorer, place, hidden.visits, key)
            predicted, retrained = runs.predicted, runs.retrained
    label = explorer.label(place)
    known = [found for found in (direct, predicted, retrained) if isinstance(found, Tensor)]
    likely = [number for found in known for number in found.topk(min(3, len(found))).indices.tolist()]
    says = explorer.says(logits, SHOWN_CLASSES, [*likely, *([] if label is None else [label])])
    answers = []
    if hidden.visits.any():
        held = "their contributions taken out, everything else held fixed"
        answers.append(_answer(explorer, "direct", held, direct, says))
        if again:
            why = runs.reason or ("" if predicted is not None else "for networks with up to 20 classes")
            answers += [
                _answer(explorer, "predicted", "carried through every later step of training", predicted, says, why),
                _answer(explorer, "retrained", "really trained again without them", retrained, says, runs.reason),
            ]
    return WhatIfView(
        **explorer.about(place),
        says=says,
        answers=answers,
        best=next((answer for answer in reversed(answers) if answer.scores is not None), None),
        hidden=int(hidden.visits.sum()),
        visits=len(hidden.visits),
        masks=masks,
        boxes=_boxes(explorer, by, masks) if columns else [],
        columns=columns,
        edges=edges_of(explorer),
        examples=_maskable_examples(explorer, place, masks),
        selected=len(explorer.selection),
        note=f"Under the mask: {REMOVED}. {MASKED}",
        caveat=runs.caveat,
        problems=hidden.problems,
    )


def _answer(
    explorer: Explorer, name: str, meaning: str, logits: Tensor | PendingWork | None, says: list[ClassScore],
    reason: str = "",
) -> CounterfactualAnswer:  # fmt: skip
    if not isinstance(logits, Tensor):
        return CounterfactualAnswer(name, meaning, None, [], "", False, logits, reason)
    scores = named_logits(explorer, logits, [score.number for score in says])
    first = explorer.says(logits, 1)[0]
    changes = [now.logit - before.logit for now, before in zip(scores, says, strict=True)]
    return CounterfactualAnswer(name, meaning, scores, changes, first.name, first.number != says[0].number, None, "")


def _boxes(explorer: Explorer, by: str, masks: WhatIfMasks) -> list[GroupBox]:
    counts = explorer.counts(by)
    return [
        GroupBox(str(value), name_of(explorer, by, value), counts.get(value, 0), str(value) in masks.groups)
        for value in explorer.groups(by)
    ]


def _maskable_examples(explorer: Explorer, place: ExamplePlace, masks: WhatIfMasks) -> list[MaskedExample]:
    """The masked examples, then offers: those that the prediction is mostly made of."""
    indices: list[Any] = list(masks.examples)
    if explorer.index in explorer.memory.store.visits.column_names:
        view = predict(explorer, place, PredictionQuestion(k=OFFERED))
        offers = [] if isinstance(view, PendingWork) else [example.index for example in view.examples or ()]
        indices += [index for index in offers if isinstance(index, int) and index not in indices]
    labels = explorer.own_labels
    return [
        MaskedExample(
            index, explorer.trained_on(index), label_name(explorer, labels.get(index)), index in masks.examples
        )
        for index in indices
    ]
