"""What if: the network without some of its training, beside the network as it is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool

from dualform.errors import DualformError, FilterError, QueryError
from dualform.explain import Memory, matching, stretch_edges

from ..examples import ShownExample
from ..text import MASKED, need_logits
from .explorer import MANY, ClassScore, ExampleHeader, ExamplePlace, Explorer
from .prediction import name_of
from .work import PendingWork, Tell

STRETCHES, SAID = 20, 10
"""Parts of training that can be masked each, and classes that are shown."""

MOST_EXAMPLES = 100

OFFERED = 8
"""Training examples that are offered to be masked."""

REMOVED = "direct contribution removed, not retrained"


@dataclass(frozen=True)
class WhatIfMasks:
    """What is masked: groups of a column, a time, single training examples, and what a filter says."""

    by: str | None = None
    groups: tuple[str, ...] = ()
    after: int | None = None
    upto: int | None = None
    examples: tuple[int, ...] = ()
    filter: str = ""

    def bounded(self, steps: int) -> "WhatIfMasks":
        """With both ends of the time, where one was given."""
        if (self.after is None) == (self.upto is None):
            return self
        return replace(self, after=self.after or 0, upto=steps if self.upto is None else self.upto)

    @property
    def nothing(self) -> bool:
        """Whether nothing is masked."""
        return not (self.groups or self.examples or self.filter or self.timed)

    @property
    def timed(self) -> bool:
        """Whether a time is masked."""
        return self.after is not None and self.upto is not None and self.upto > self.after


@dataclass(frozen=True)
class GroupBox:
    """A group that can be masked."""

    value: str
    name: str
    visits: int
    ticked: bool


@dataclass(frozen=True)
class MaskedExample:
    """A training example that is masked, or could be."""

    index: int
    shown: ShownExample | None
    label: Any
    ticked: bool


@dataclass(frozen=True)
class WhatIfView(ExampleHeader):
    """All that the page shows. ``without`` are the same classes as ``says``; None while nothing is masked."""

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
    """Why something that was asked for is not masked."""
    pending: PendingWork | None


def what_if(explorer: Explorer, place: ExamplePlace, masks: WhatIfMasks) -> WhatIfView:
    """What the network says of an example with and without some of its training."""
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
        found = masked_memory(explorer, masks, by, hidden)
        if isinstance(found, PendingWork):
            pending = found
        else:
            with explorer.lock:
                without = need_logits(found.predict(explorer.model, explorer.input(place), progress=False))[0]
    label = explorer.label(place)
    likely = [] if without is None else without.topk(min(3, len(without))).indices.tolist()
    says = explorer.says(logits, SAID, [*likely, *([] if label is None else [label])])
    beside = None if without is None else {each.number: each for each in explorer.says(without)}
    return WhatIfView(
        **explorer.about(place),
        says=says,
        without=None if beside is None else [beside[each.number] for each in says],
        changed=without is not None and int(without.argmax()) != int(logits.argmax()),
        hidden=int(hidden.sum()),
        visits=len(hidden),
        masks=masks,
        boxes=_boxes(explorer, by, masks) if columns else [],
        columns=columns,
        edges=edges,
        examples=_singles(explorer, place, masks),
        note=f"With the mask: {REMOVED}. {MASKED}",
        problem=problem,
        pending=pending,
    )


def _never_trained_on(explorer: Explorer, masks: WhatIfMasks) -> str:
    """Say which examples no mask can remove."""
    counts = explorer.counts(explorer.index) if masks.examples else {}
    unknown = [index for index in masks.examples if not counts.get(index)]
    return f"Example {unknown[0]} was never trained on, so nothing of it is removed." if unknown else ""


def hidden_by(explorer: Explorer, masks: WhatIfMasks, by: str) -> Bool[np.ndarray, " V"]:
    """For each visit whether it is masked."""
    visits = explorer.memory.store.visits
    hidden = np.zeros(len(visits), bool)
    if masks.groups:
        known = {str(value): value for value in explorer.groups(by)}
        if unknown := [group for group in masks.groups if group not in known]:
            raise QueryError(f"no group {unknown[0]!r} in column '{by}': there are {list(known)[:10]}.")
        wanted = {known[group] for group in masks.groups}
        hidden |= np.array([value in wanted for value in visits[by].to_pylist()])
    if masks.after is not None and masks.upto is not None and not masks.timed:
        raise QueryError(f"nothing lies after step {masks.after:,} and up to step {masks.upto:,}.")
    if masks.timed:
        steps = visits["step"].to_numpy()
        hidden |= (steps > masks.after) & (steps <= masks.upto)
    if masks.examples:
        if len(masks.examples) > MOST_EXAMPLES:
            raise QueryError(f"at most {MOST_EXAMPLES} single examples can be masked here; a condition masks more.")
        if explorer.index not in visits.column_names:
            raise QueryError(f"single examples cannot be masked: no column '{explorer.index}' was noted.")
        hidden |= np.isin(visits[explorer.index].to_numpy(zero_copy_only=False), masks.examples)
    if masks.filter:
        if len(masks.filter) > 500:
            raise FilterError("the filter is longer than 500 characters. Write a shorter condition.")
        hidden |= matching(visits, masks.filter, plain=True)
    return hidden


def masked_memory(
    explorer: Explorer, masks: WhatIfMasks, by: str, hidden: Bool[np.ndarray, " V"]
) -> Memory | PendingWork:  # fmt: skip
    """The memory through the masks: by the ledger where they are whole groups or stretches, else by its slots."""
    memory, desk = explorer.memory, explorer.desk
    single = bool(masks.examples or masks.filter)
    if masks.groups and not masks.timed and not single:
        book = ledger_of(explorer, by)
    elif masks.timed and not masks.groups and not single and {masks.after, masks.upto} <= set(edges_of(explorer)):
        book = ledger_of_time(explorer)
    else:
        summing = _working(lambda tell: memory.held_weights(progress=tell))
        book = desk.need(("exact", memory.step), "the weights as a sum", explorer.rebuilding, summing)
    if isinstance(book, PendingWork):
        return book
    without = memory.without(hidden)
    share = 0.0 if not single and not (masks.groups and masks.timed) else float(hidden.mean())
    shaped = any(memory.store.is_preconditioned(p.name) for p in memory.store.manifest.parameters if p.kind != "rest")
    seconds = explorer.rebuilding * (1.0 if shaped and share else min(share, 1 - share))

    def work(tell: Tell) -> Memory:
        without.held_weights(progress=tell)
        return without

    key = ("without", by, masks, memory.step)
    return desk.need(key, f"the weights without {int(hidden.sum()):,} visits", seconds, work)


def ledger_of(explorer: Explorer, by: str) -> Any:
    """The ledger of a column, in the background where that takes long."""
    work = _working(lambda tell: explorer.memory.ledger(by, progress=tell))
    return explorer.desk.need(("ledger", by), f"the ledger by {by}", explorer.rebuilding * 1.5, work)


def ledger_of_time(explorer: Explorer) -> Any:
    """The ledger of the stretches of training."""
    memory = explorer.memory
    edges = stretch_edges(memory.step, STRETCHES)
    stretch = np.searchsorted(edges, memory.store.visits["step"].to_numpy(), side="left") - 1
    work = _working(lambda tell: memory.ledger(stretch.tolist(), progress=tell))
    return explorer.desk.need(("ledger", "step"), "the ledger by time", explorer.rebuilding * 1.5, work)


def edges_of(explorer: Explorer) -> list[int]:
    """Where the stretches of training begin and end that can be masked each."""
    return stretch_edges(explorer.memory.step, STRETCHES).tolist()


def _working(work: Callable[[Tell], Any]) -> Callable[[Tell], bool]:
    """Work whose result the memory keeps by itself."""

    def done(tell: Tell) -> bool:
        work(tell)
        return True

    return done


def _boxes(explorer: Explorer, by: str, masks: WhatIfMasks) -> list[GroupBox]:
    counts = explorer.counts(by)
    return [
        GroupBox(str(value), name_of(explorer, by, value), counts.get(value, 0), str(value) in masks.groups)
        for value in explorer.groups(by)
    ]


def _singles(explorer: Explorer, place: ExamplePlace, masks: WhatIfMasks) -> list[MaskedExample]:
    """The examples that are masked, and those that were among the top ones of this place when it was looked at."""
    train, found = explorer.train, list(masks.examples)
    for answer in explorer.desk.latest("answer", place):
        for hit in answer.hits or ():
            index = hit.columns.get(explorer.index)
            if isinstance(index, int) and index not in found and len(found) < len(masks.examples) + OFFERED:
                found.append(index)
    return [
        MaskedExample(i, explorer.trained_on(i), None if train is None else train.label(i), i in masks.examples)
        for i in found
    ]
