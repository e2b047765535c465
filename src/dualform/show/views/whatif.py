"""What if: the network without some of its training, beside the network as it is.

A page that masks something needs the weights of the masked network. Three functions find them, and each announces its
work to the explorer's :class:`WorkQueue` with an estimate of the time:

- :func:`ledger_of`, :func:`ledger_of_time`: a ledger, one set of weights for each group of visits. Slow, once a column.
- :func:`_weights_by_ledger`: masks of whole groups, or whole stretches of training, sum the other groups. Immediate.
- :func:`_weights_by_slots`: all other masks sum the slots of the hidden visits, or of the shown ones. Slow, each time.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from dualform.errors import DualformError, FilterError, QueryError
from dualform.explain import Ledger, Memory, matching, stretch_edges
from dualform.progress import Progress

from ..examples import ShownExample
from ..text import MASKED, need_logits
from .explorer import MANY, ClassScore, ExampleHeader, ExamplePlace, Explorer
from .prediction import name_of
from .work import PendingWork

STRETCHES, SHOWN_CLASSES = 20, 10
"""Into how many stretches training is cut for masking, and how many classes are shown."""

MOST_EXAMPLES, LONGEST_FILTER = 100, 500
"""The most single examples that can be masked, and the most characters of a condition."""

OFFERED = 8
"""How many training examples are offered for masking."""

REMOVED = "direct contribution removed, not retrained"


@dataclass(frozen=True)
class WhatIfMasks:
    """What is masked: groups of a column, a stretch of training, single examples, and visits that match a filter."""

    by: str | None = None
    groups: tuple[str, ...] = ()
    after: int | None = None
    upto: int | None = None
    examples: tuple[int, ...] = ()
    filter: str = ""

    def bounded(self, steps: int) -> "WhatIfMasks":
        """The same masks with both ends of the stretch of training, if one end was given."""
        if (self.after is None) == (self.upto is None):
            return self
        return replace(self, after=self.after or 0, upto=steps if self.upto is None else self.upto)

    @property
    def nothing(self) -> bool:
        """Whether nothing is masked."""
        return not (self.groups or self.examples or self.filter or self.timed)

    @property
    def timed(self) -> bool:
        """Whether a stretch of training is masked."""
        return self.after is not None and self.upto is not None and self.upto > self.after

    @property
    def only_groups(self) -> bool:
        """Whether whole groups are masked and nothing else."""
        return bool(self.groups) and not (self.timed or self.examples or self.filter)

    @property
    def only_time(self) -> bool:
        """Whether a stretch of training is masked and nothing else."""
        return self.timed and not (self.groups or self.examples or self.filter)


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
    label: Any
    ticked: bool


@dataclass(frozen=True)
class WhatIfView(ExampleHeader):
    """Everything the page shows. ``without`` has the classes of ``says`` under the mask; None if nothing is masked."""

    says: list[ClassScore]
    without: list[ClassScore] | None
    changed: bool
    hidden: int
    visits: int
    masks: WhatIfMasks
    boxes: list[GroupBox]
    columns: list[str]
    edges: list[int]
    examples: list[MaskedExample]
    note: str
    problem: str
    """Why part of what was asked for is not masked."""
    pending: PendingWork | None


def what_if(explorer: Explorer, place: ExamplePlace, masks: WhatIfMasks) -> WhatIfView:
    """What the network predicts for an example with and without some of its training."""
    explorer.need(place)
    memory, by = explorer.memory, masks.by or explorer.columns[0]
    columns = [name for name in explorer.columns if len(explorer.groups(name)) <= MANY]
    by = by if by in columns else columns[0] if columns else by
    edges = edges_of(explorer)
    logits = need_logits(explorer.predict(place))[0]
    masks = masks.bounded(memory.step)
    hidden, problem = np.zeros(len(memory.store.visits), bool), ""
    try:
        hidden = hidden_by(explorer, masks, by)
        problem = _never_trained_on(explorer, masks)
    except DualformError as error:
        problem = str(error)
    without, pending = None, None
    if hidden.any():
        masked = masked_weights(explorer, masks, by, hidden)
        if isinstance(masked, PendingWork):
            pending = masked
        else:
            without = need_logits(explorer.predict_with(masked, place))[0]
    label = explorer.label(place)
    likely = [] if without is None else without.topk(min(3, len(without))).indices.tolist()
    says = explorer.says(logits, SHOWN_CLASSES, [*likely, *([] if label is None else [label])])
    beside = None if without is None else {score.number: score for score in explorer.says(without)}
    return WhatIfView(
        **explorer.about(place),
        says=says,
        without=None if beside is None else [beside[score.number] for score in says],
        changed=without is not None and int(without.argmax()) != int(logits.argmax()),
        hidden=int(hidden.sum()),
        visits=len(hidden),
        masks=masks,
        boxes=_boxes(explorer, by, masks) if columns else [],
        columns=columns,
        edges=edges,
        examples=_maskable_examples(explorer, place, masks),
        note=f"Under the mask: {REMOVED}. {MASKED}",
        problem=problem,
        pending=pending,
    )


def _never_trained_on(explorer: Explorer, masks: WhatIfMasks) -> str:
    """A sentence about masked examples without a visit, which no mask can remove; empty if there are none."""
    counts = explorer.counts(explorer.index) if masks.examples else {}
    unknown = [index for index in masks.examples if not counts.get(index)]
    return f"Example {unknown[0]} was never trained on, so there is nothing to remove." if unknown else ""


def hidden_by(explorer: Explorer, masks: WhatIfMasks, by: str) -> Bool[np.ndarray, " V"]:
    """One flag per visit: whether the masks hide it."""
    visits = explorer.memory.store.visits
    hidden = np.zeros(len(visits), bool)
    if masks.groups:
        groups_by_name = _groups_by_name(explorer, by)
        if unknown := [group for group in masks.groups if group not in groups_by_name]:
            raise QueryError(f"no group {unknown[0]!r} in column '{by}': there are {list(groups_by_name)[:10]}.")
        wanted = {groups_by_name[group] for group in masks.groups}
        hidden |= np.array([value in wanted for value in visits[by].to_pylist()])
    if masks.after is not None and masks.upto is not None and not masks.timed:
        raise QueryError(f"no step lies after step {masks.after:,} and up to step {masks.upto:,}.")
    if masks.timed:
        steps = visits["step"].to_numpy()
        hidden |= (steps > masks.after) & (steps <= masks.upto)
    if masks.examples:
        if len(masks.examples) > MOST_EXAMPLES:
            raise QueryError(
                f"at most {MOST_EXAMPLES} single examples can be masked here. To mask more, write a condition."
            )
        if explorer.index not in visits.column_names:
            raise QueryError(
                f"single examples cannot be masked: no column '{explorer.index}' was noted while recording."
            )
        hidden |= np.isin(visits[explorer.index].to_numpy(zero_copy_only=False), masks.examples)
    if masks.filter:
        if len(masks.filter) > LONGEST_FILTER:
            raise FilterError(f"the filter is longer than {LONGEST_FILTER} characters. Write a shorter condition.")
        hidden |= matching(visits, masks.filter, plain=True)
    return hidden


def masked_weights(
    explorer: Explorer, masks: WhatIfMasks, by: str, hidden: Bool[np.ndarray, " V"]
) -> dict[str, Tensor] | PendingWork:  # fmt: skip
    """The weights of the network without the hidden visits: from a ledger where that is possible, else from slots."""
    edges = edges_of(explorer)
    if masks.only_groups:
        groups_by_name = _groups_by_name(explorer, by)
        return _weights_by_ledger(
            explorer, masks, by, ledger_of(explorer, by), {groups_by_name[group] for group in masks.groups}
        )
    if masks.only_time and masks.after in edges and masks.upto in edges:
        stretches = set(range(edges.index(masks.after), edges.index(masks.upto)))
        return _weights_by_ledger(explorer, masks, by, ledger_of_time(explorer), stretches)
    return _weights_by_slots(explorer, masks, by, hidden)


def _weights_by_ledger(
    explorer: Explorer, masks: WhatIfMasks, by: str, ledger: Ledger | PendingWork, hidden_groups: set[Any]
) -> dict[str, Tensor] | PendingWork:  # fmt: skip
    """The initial part and the groups that are not hidden, summed."""
    if isinstance(ledger, PendingWork):
        return ledger
    return explorer.work_queue.result(
        ("without", by, masks), "the weights without some groups", 0.0,
        lambda progress: sum_of_shown_groups(explorer.memory, ledger, hidden_groups),
    )  # fmt: skip


def sum_of_shown_groups(memory: Memory, ledger: Ledger, hidden_groups: set[Any]) -> dict[str, Tensor]:
    """Every parameter and buffer that the memory holds, without the parts of some groups of a ledger."""
    store, not_kept = memory.store, set(memory.store.not_kept(memory.step))
    shown = [parts for group, parts in ledger.groups.items() if group not in hidden_groups]
    weights = {}
    for p in store.manifest.parameters:
        if p.name in ledger.initial:
            parts = torch.stack([group[p.name] for group in shown]).sum(0) if shown else 0.0
            weights[p.name] = (ledger.initial[p.name] + parts).to(getattr(torch, p.dtype))
        elif p.name not in not_kept:
            weights[p.name] = store.snapshot(p.name, memory.step)
    return weights


def _weights_by_slots(
    explorer: Explorer, masks: WhatIfMasks, by: str, hidden: Bool[np.ndarray, " V"]
) -> dict[str, Tensor] | PendingWork:  # fmt: skip
    """All weights as a sum over slots, then that sum less the hidden slots, or the shown slots alone if they are fewer.

    Both are announced. The first sum stays in the store, which the second starts from.
    """
    memory, queue = explorer.memory, explorer.work_queue

    def rebuild(progress: Progress) -> bool:
        memory.held_weights(progress=progress)
        return True

    rebuilt = queue.result(("rebuilt", memory.step), "the weights as a sum", explorer.rebuild_seconds, rebuild)
    if isinstance(rebuilt, PendingWork):
        return rebuilt
    masked, hidden_share = memory.without(hidden), float(hidden.mean())
    explained = [p.name for p in memory.store.manifest.parameters if p.kind != "rest"]
    swept = any(memory.store.is_preconditioned(name) for name in explained)  # a sweep visits all steps for any mask
    seconds = explorer.rebuild_seconds * (1.0 if swept else min(hidden_share, 1 - hidden_share))
    return queue.result(
        ("without", by, masks), f"the weights without {int(hidden.sum()):,} visits", seconds,
        lambda progress: masked.held_weights(progress=progress),
    )  # fmt: skip


def ledger_of(explorer: Explorer, by: str) -> Ledger | PendingWork:
    """The ledger of a column."""
    return explorer.work_queue.result(
        ("ledger", by), f"the ledger by {by}", explorer.ledger_seconds(len(explorer.counts(by))),
        lambda progress: explorer.memory.ledger(by, progress=progress),
    )  # fmt: skip


def ledger_of_time(explorer: Explorer) -> Ledger | PendingWork:
    """The ledger of the stretches of training: its groups are the numbers of the stretches, from 0."""
    memory = explorer.memory
    edges = stretch_edges(memory.step, STRETCHES)
    stretch = np.searchsorted(edges, memory.store.visits["step"].to_numpy(), side="left") - 1
    return explorer.work_queue.result(
        ("ledger", None), "the ledger by time", explorer.ledger_seconds(STRETCHES),
        lambda progress: memory.ledger(stretch.tolist(), progress=progress),
    )  # fmt: skip


def edges_of(explorer: Explorer) -> list[int]:
    """The steps at which the stretches of training begin and end."""
    return stretch_edges(explorer.memory.step, STRETCHES).tolist()


def _groups_by_name(explorer: Explorer, by: str) -> dict[str, Any]:
    """The groups of a column by the text that stands for them in an address."""
    return {str(value): value for value in explorer.groups(by)}


def _boxes(explorer: Explorer, by: str, masks: WhatIfMasks) -> list[GroupBox]:
    counts = explorer.counts(by)
    return [
        GroupBox(str(value), name_of(explorer, by, value), counts.get(value, 0), str(value) in masks.groups)
        for value in explorer.groups(by)
    ]


def _maskable_examples(explorer: Explorer, place: ExamplePlace, masks: WhatIfMasks) -> list[MaskedExample]:
    """The masked examples, then offers: the top examples of the prediction page of this place, if it was opened."""
    train, indices = explorer.train, list(masks.examples)
    for answer in explorer.work_queue.latest("answer", place):
        for hit in answer.hits or ():
            index = hit.columns.get(explorer.index)
            if isinstance(index, int) and index not in indices and len(indices) < len(masks.examples) + OFFERED:
                indices.append(index)
    labels = [None if train is None else train.label(index) for index in indices]
    return [
        MaskedExample(index, explorer.trained_on(index), label, index in masks.examples)
        for index, label in zip(indices, labels, strict=True)
    ]
