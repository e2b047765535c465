"""What is masked: which visits a page leaves out."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool

from dualform.errors import DualformError, FilterError, QueryError
from dualform.explain import matching, stretch_edges

from ..explorer import Explorer

STRETCHES = 20
"""Into how many stretches training is cut for masking."""

MOST_EXAMPLES, LONGEST_FILTER = 100, 500
"""The most single examples that can be masked, and the most characters of a condition."""


@dataclass(frozen=True)
class WhatIfMasks:
    """What is masked: groups of a column, a stretch of training, single examples, and visits that match a filter."""

    by: str | None = None
    groups: tuple[str, ...] = ()
    after: int | None = None
    upto: int | None = None
    examples: tuple[int, ...] = ()
    filter: str = ""
    selected: bool = False
    """Whether the examples that visitors selected are masked."""

    def all_examples(self, explorer: Explorer) -> tuple[Any, ...]:
        """The single examples that are masked, with those that visitors selected if these are."""
        return (*self.examples, *(explorer.selection if self.selected else ()))

    def bounded(self, steps: int) -> "WhatIfMasks":
        """The same masks with both ends of the stretch of training, if one end was given."""
        if (self.after is None) == (self.upto is None):
            return self
        return replace(self, after=self.after or 0, upto=steps if self.upto is None else self.upto)

    @property
    def nothing(self) -> bool:
        """Whether nothing is masked."""
        return not (self.groups or self.examples or self.filter or self.timed or self.selected)

    @property
    def timed(self) -> bool:
        """Whether a stretch of training is masked."""
        return self.after is not None and self.upto is not None and self.upto > self.after

    @property
    def only_groups(self) -> bool:
        """Whether whole groups are masked and nothing else."""
        return bool(self.groups) and not (self.timed or self.examples or self.filter or self.selected)

    @property
    def only_time(self) -> bool:
        """Whether a stretch of training is masked and nothing else."""
        return self.timed and not (self.groups or self.examples or self.filter or self.selected)


@dataclass(frozen=True)
class HiddenVisits:
    """The visits that masks hide, and what is wrong with a mask, by its field."""

    visits: Bool[np.ndarray, " V"]
    problems: dict[str, str]
    """Sentences, by the field of the form that they belong to: group, time, example, filter."""


def hidden_by(explorer: Explorer, masks: WhatIfMasks, by: str) -> HiddenVisits:
    """One flag per visit: whether the masks hide it. A mask that makes no sense hides nothing, and says why."""
    visits = explorer.memory.store.visits
    hidden, problems = np.zeros(len(visits), bool), {}
    for field, find in (("group", _of_groups), ("time", _of_time), ("example", _of_examples), ("filter", _of_filter)):
        try:
            hidden |= find(explorer, masks, by)
        except DualformError as error:
            problems[field] = str(error)
    if "example" not in problems and (sentence := _never_trained_on(explorer, masks)):
        problems["example"] = sentence
    return HiddenVisits(hidden, problems)


def _none(explorer: Explorer) -> Bool[np.ndarray, " V"]:
    return np.zeros(len(explorer.memory.store.visits), bool)


def _of_groups(explorer: Explorer, masks: WhatIfMasks, by: str) -> Bool[np.ndarray, " V"]:
    if not masks.groups:
        return _none(explorer)
    of_name = groups_by_name(explorer, by)
    if unknown := [group for group in masks.groups if group not in of_name]:
        raise QueryError(f"no group {unknown[0]!r} in column '{by}': there are {list(of_name)[:10]}.")
    wanted = {of_name[group] for group in masks.groups}
    return np.array([value in wanted for value in explorer.memory.store.visits[by].to_pylist()])


def _of_time(explorer: Explorer, masks: WhatIfMasks, by: str) -> Bool[np.ndarray, " V"]:
    if masks.after is not None and masks.upto is not None and not masks.timed:
        raise QueryError(f"no step lies after step {masks.after:,} and up to step {masks.upto:,}.")
    if not masks.timed:
        return _none(explorer)
    steps = explorer.memory.store.visits["step"].to_numpy()
    return (steps > masks.after) & (steps <= masks.upto)


def _of_examples(explorer: Explorer, masks: WhatIfMasks, by: str) -> Bool[np.ndarray, " V"]:
    visits, wanted = explorer.memory.store.visits, masks.all_examples(explorer)
    if not wanted:
        return _none(explorer)
    if len(masks.examples) > MOST_EXAMPLES:
        raise QueryError(
            f"at most {MOST_EXAMPLES} single examples can be masked here. To mask more, select them on the page of the "
            "training set, or write a condition."
        )
    if explorer.index not in visits.column_names:
        raise QueryError(f"single examples cannot be masked: no column '{explorer.index}' was noted while recording.")
    return np.isin(visits[explorer.index].to_numpy(zero_copy_only=False), wanted)


def _of_filter(explorer: Explorer, masks: WhatIfMasks, by: str) -> Bool[np.ndarray, " V"]:
    if not masks.filter:
        return _none(explorer)
    if len(masks.filter) > LONGEST_FILTER:
        raise FilterError(f"the filter is longer than {LONGEST_FILTER} characters. Write a shorter condition.")
    return matching(explorer.memory.store.visits, masks.filter, plain=True)


def _never_trained_on(explorer: Explorer, masks: WhatIfMasks) -> str:
    """A sentence about masked examples without a visit, which no mask can remove; empty if there are none."""
    counts = explorer.counts(explorer.index) if masks.examples else {}
    unknown = [index for index in masks.examples if not counts.get(index)]
    return f"Example {unknown[0]} was never trained on, so there is nothing to remove." if unknown else ""


def groups_by_name(explorer: Explorer, by: str) -> dict[str, Any]:
    """The groups of a column by the text that stands for them in an address."""
    return {str(value): value for value in explorer.groups(by)}


def edges_of(explorer: Explorer) -> list[int]:
    """The steps at which the stretches of training begin and end."""
    return stretch_edges(explorer.memory.step, STRETCHES).tolist()
