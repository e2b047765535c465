"""Groups of slots: by a column of their visits, and by stretches of training time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int

from dualform.errors import QueryError, UnknownColumn
from dualform.store import Block, Store


@dataclass(frozen=True)
class GroupOfSlot:
    """The group of each slot, through its visit. The last entry is for visits that are not known."""

    column: str
    """The column whose values are the groups; empty if all slots are one group."""
    names: tuple[Any, ...]
    of_visit: Int[np.ndarray, " V1"]

    @classmethod
    def of_visits(cls, column: str, names: tuple[Any, ...], ids: Int[np.ndarray, " V"]) -> "GroupOfSlot":
        """Groups by the number that each visit has; unknown visits are in the last group."""
        return cls(column, names, np.append(ids, len(names) - 1))

    def __call__(self, block: Block) -> Int[np.ndarray, " m"]:
        """The groups of the slots of a block."""
        return self.of_visit[block.visits]


@dataclass(frozen=True)
class GroupAndPosition(GroupOfSlot):
    """The group of each slot and its position in the example: names are (group, position)."""

    positions: int

    @classmethod
    def in_layer(cls, store: Store, layer: str, column: str) -> "GroupAndPosition":
        """The groups of a column at each position of a layer."""
        groups, calls = group_slots(store, [layer], column), store.calls(layer)
        positions = int((calls.rows // calls.batch).max(initial=1))
        names = tuple((name, position) for name in groups.names for position in range(positions))
        return cls(column, names, groups.of_visit, positions)

    def __call__(self, block: Block) -> Int[np.ndarray, " m"]:
        """The groups and positions of the slots of a block, as one number."""
        return super().__call__(block) * self.positions + block.calls.positions_of(block.slots)


class Stretches:
    """The group of each slot and its stretch of training time, as one number."""

    def __init__(self, horizon: int, stretches: int, groups: GroupOfSlot) -> None:
        self.groups, self.names = groups, groups.names
        edges = stretch_edges(horizon, stretches)
        self.edges, self._edges = torch.from_numpy(edges), edges
        self.count = len(groups.names) * (len(edges) - 1)

    def __call__(self, block: Block) -> Int[np.ndarray, " m"]:
        """The group and stretch of the slots of a block, as one number."""
        stretch = np.searchsorted(self._edges, block.steps, side="left") - 1
        return self.groups(block) * (len(self._edges) - 1) + stretch


def stretch_edges(steps: int, stretches: int) -> Int[np.ndarray, " s1"]:
    """The steps at which equal stretches of training begin and end; there are at most as many stretches as steps."""
    return np.unique(np.round(np.linspace(0, steps, min(stretches, max(1, steps)) + 1)).astype(np.int64))


def group_slots(store: Store, layers: Sequence[str], column: str | None) -> GroupOfSlot:
    """The groups of a column; without one all slots are one group.

    If some slots of these layers have no value in the column, the last group is None.
    """
    if column is None:
        return GroupOfSlot("", ("all",), np.zeros(len(store.visits) + 1, np.int64))
    names, ids = groups_of(store, column)
    if (ids == len(names)).any() or any((store.calls(layer).visit < 0).any() for layer in layers if store.slots(layer)):
        names = (*names, None)
    return GroupOfSlot.of_visits(column, names, ids)


def groups_of(store: Store, column: str) -> tuple[tuple[Any, ...], Int[np.ndarray, " V"]]:
    """The sorted values of a column, and the number of each visit's value (one more than the last if it has none).

    The answer is cached for the next question.
    """
    require_column(store.visits, column)
    return store.cache.column_groups(column, lambda: groups_of_visits(store.visits, column))


def require_column(visits: pa.Table, column: str) -> None:
    """Raise unless the visits have a column."""
    if column not in visits.column_names:
        raise UnknownColumn(
            f"no column '{column}' among the visits: there are {visits.column_names}. Note it while recording."
        )


def groups_from_values(store: Store, values: Iterable[Any]) -> tuple[tuple[Any, ...], Int[np.ndarray, " V"]]:
    """The groups of one value per visit, in the form of ``groups_of``."""
    labels = values.tolist() if isinstance(values, np.ndarray | torch.Tensor) else list(values)
    if len(labels) != len(store.visits):
        raise QueryError(f"{len(labels):,} groups were given for the {len(store.visits):,} visits: give one for each.")
    return groups_of_visits(pa.table({"group": labels}), "group")


def groups_of_visits(visits: pa.Table, column: str) -> tuple[tuple[Any, ...], Int[np.ndarray, " V"]]:
    """The sorted values of a column, and the number of each visit's value (one more than the last if it has none)."""
    encoded = visits[column].combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    names = encoded.dictionary.to_pylist()
    order = sorted(range(len(names)), key=names.__getitem__)
    place = np.empty(len(names) + 1, np.int64)
    place[order] = np.arange(len(names))
    place[-1] = len(names)  # null
    ids = encoded.indices.fill_null(len(names)).to_numpy(zero_copy_only=False)
    return tuple(names[i] for i in order), place[ids]
