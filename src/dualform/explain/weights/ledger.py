"""A ledger splits the weights by groups of visits: the parts of all groups and the initial part sum to the weights."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.engine import StoreView
from dualform.errors import QueryError
from dualform.progress import Progress
from dualform.store import LedgerKey, LedgerParts, Store

from ..groups import GroupOfSlot, groups_from_values, groups_of
from ..notebook import Displayed, ledger_html, ledger_lines
from .network import explained, split_by

LARGEST = 4 << 30
"""The most bytes that a ledger may take."""


@dataclass(frozen=True)
class Ledger(Displayed, Mapping[Any, Mapping[str, Tensor]]):
    """What each group put into the weights: group → parameter → tensor. ``initial`` + all groups = the weights."""

    column: str
    step: int
    initial: Mapping[str, Tensor]
    groups: Mapping[Any, Mapping[str, Tensor]]

    def __getitem__(self, group: Any) -> Mapping[str, Tensor]:
        if group not in self.groups:
            raise QueryError(f"no group {group!r} in column '{self.column}': there are {first_names(self.groups)}.")
        return self.groups[group]

    def __contains__(self, group: object) -> bool:
        return group in self.groups

    def __iter__(self) -> Iterator[Any]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __str__(self) -> str:
        return "\n".join(ledger_lines(self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return ledger_html(self)

    def total(self, parameter: str) -> Tensor:
        """The parameter itself: the initial part and all groups added up."""
        return torch.stack([self.initial[parameter], *(parts[parameter] for parts in self.groups.values())]).sum(0)


def make_ledger(store: Store, view: StoreView, column: str | Iterable[Any], progress: Progress) -> Ledger:
    """Split the weights by the values of a column. A group None holds the slots of unknown visits, if there are any."""
    names, ids = groups_of(store, column) if isinstance(column, str) else groups_from_values(store, column)
    column = column if isinstance(column, str) else "group"
    if not explained(store):
        raise QueryError(
            "the weights of this memory are snapshots, as only keys were kept or no rule explains the optimiser, so no "
            "part of them belongs to a group. Record with keep='slots' and an optimiser that has a rule."
        )
    groups = GroupOfSlot.of_visits(column, (*names, None), ids)
    size = 8 * len(groups.names) * sum(math.prod(store.parameters[name].shape) for name in explained(store))
    if size > LARGEST:
        raise QueryError(
            f"a ledger of '{column}' would hold {len(names):,} copies of the weights ({size / 2**30:.1f} GiB). "
            f"Choose a coarser column, or ask spot.by({column!r}, …) about single queries."
        )

    def make() -> LedgerParts:
        visits = np.flatnonzero(store.visits["step"].to_numpy() <= view.horizon)
        parts = split_by(store, view, explained(store), progress, group_of=groups, groups=len(groups.names))
        return LedgerParts(view.horizon, visits, groups.of_visit[visits], parts)

    ledgers = store.cache.ledgers if view.visible is None else store.cache.masked_ledgers
    parts = ledgers(LedgerKey(view.key, groups.of_visit.tobytes()), make).parts
    used = [
        i
        for i, name in enumerate(groups.names)
        if name is not None or any(bool(part.groups[i].any()) for part in parts.values())
    ]
    return Ledger(
        column, view.horizon, {name: part.initial for name, part in parts.items()},
        {groups.names[i]: {name: part.groups[i] for name, part in parts.items()} for i in used},
    )  # fmt: skip


def first_names(names: Iterable[Any]) -> str:
    """The first few names, for a message."""
    listed = list(names)
    return f"{listed[:8]}{' …' if len(listed) > 8 else ''}"
