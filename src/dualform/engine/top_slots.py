"""The k slots with the best scores, kept up to date block by block: over all slots, or in each group of slots."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.store import Block
from dualform.types import Order, Score

from .scan import Scores

STRETCH = 256
"""Slots whose best score is looked at first."""


class TopSlots:
    """The exact k best slots of every example. Equal scores keep the order of training: the earlier slot first."""

    def __init__(self, k: int, examples: int, score: Score, order: Order) -> None:
        self.k = k
        self.score: Score = score
        self.order: Order = order
        self.key = torch.full((examples, k), -torch.inf, dtype=torch.float64)
        self.slot = torch.full((examples, k), -1, dtype=torch.int64)
        self.found = torch.full((examples, k), torch.nan, dtype=torch.float64)
        """Their scores."""

    def add(self, scores: Scores) -> None:
        """Look for slots that beat the worst of the best."""
        self.look(scores.first, scores[self.score], scores.ids)

    def look(self, first: int, found: Float[Tensor, "n m"], slots: Int[np.ndarray, " m"]) -> None:
        """The same, given the scores of some examples for some slots."""
        key = found
        if self.order != "largest":
            key = key.neg() if self.order == "smallest" else key.abs()
        rows = slice(first, first + len(key))
        better = self._better(key, self.key[rows, -1].to(key.dtype))
        if better is None:
            return
        row, column, value = better
        rows, mine = (first + row).unique_consecutive(return_inverse=True)
        ids = torch.from_numpy(slots[column.numpy()])
        self._merge(rows, mine, value.double(), ids, found[row, column].double())

    def _better(
        self, key: Float[Tensor, "n m"], worst: Float[Tensor, " n"]
    ) -> tuple[Int[Tensor, " c"], Int[Tensor, " c"], Float[Tensor, " c"]] | None:
        """Row, column and value of all that is better than the worst, and of about k a row at most.

        Most stretches of a row hold nothing of the kind, and their maximum says so.
        """
        size = min(STRETCH, key.shape[1])
        even = key.shape[1] // size * size
        parts = [(0, key[:, :even].unflatten(1, (-1, size)))]
        if even < key.shape[1]:
            parts.append((even, key[:, even:].unsqueeze(1)))
        bar = worst.unsqueeze(1)
        peaks = [part.amax(2) for _, part in parts]
        if sum(int(torch.count_nonzero(peak > bar)) for peak in peaks) > 2 * self.k * len(key):
            least = key.topk(min(self.k, key.shape[1]), dim=1).values[:, -1:]
            bar = bar.maximum(least.nextafter(least.new_tensor(-torch.inf)))  # equal ones stay: the earlier wins
        found = []
        for (begin, part), peak in zip(parts, peaks, strict=True):
            row, stretch = torch.nonzero(peak > bar, as_tuple=True)
            if len(row):
                values = part[row, stretch]
                at, column = torch.nonzero(values > bar[row], as_tuple=True)
                found.append((row[at], begin + stretch[at] * size + column, values[at, column]))
        if len(found) < 2:
            return found[0] if found else None
        row, column, value = (torch.cat(each) for each in zip(*found, strict=True))
        order = row.argsort(stable=True)
        return row[order], column[order], value[order]

    def _merge(
        self, rows: Int[Tensor, " r"], mine: Int[Tensor, " c"], values: Float[Tensor, " c"], ids: Int[Tensor, " c"],
        found: Float[Tensor, " c"],
    ) -> None:  # fmt: skip
        """Keep the best of what was kept and what is new, in the order of training where they are equal.

        ``mine`` says to which of the rows each of the new ones belongs.
        """
        own = torch.arange(len(rows)).repeat_interleave(self.k)
        row, value, slot, score = (
            torch.cat(each)
            for each in (
                (own, mine),
                (self.key[rows].flatten(), values),
                (self.slot[rows].flatten(), ids),
                (self.found[rows].flatten(), found),
            )
        )
        order = slot.argsort(stable=True)
        order = order[value[order].argsort(descending=True, stable=True)]
        order = order[row[order].argsort(stable=True)]
        begin = torch.searchsorted(row[order], torch.arange(len(rows)))
        best = order[begin.unsqueeze(1) + torch.arange(self.k)]
        self.key[rows], self.slot[rows], self.found[rows] = value[best], slot[best], score[best]


class TopSlotsByGroup:
    """The exact k best slots of every example in each group. ``group_of`` gives the group of each slot of a block."""

    def __init__(
        self, groups: int, k: int, examples: int, score: Score, order: Order,
        group_of: Callable[[Block], Int[np.ndarray, " m"]],
    ) -> None:  # fmt: skip
        self.best = [TopSlots(k, examples, score, order) for _ in range(groups)]
        self.group_of = group_of
        self.score: Score = score

    def add(self, scores: Scores) -> None:
        """Look for slots that beat the worst of the best of their group."""
        values, group = scores[self.score], scores.of_blocks(self.group_of)
        order = np.argsort(group, kind="stable")
        names, begins = np.unique(group[order], return_index=True)
        for name, some in zip(names.tolist(), np.split(order, begins[1:]), strict=True):
            self.best[name].look(scores.first, values[:, torch.from_numpy(some)], scores.ids[some])
