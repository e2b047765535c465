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
"""The number of slots in a stretch: only stretches whose best score is good enough are searched."""


class TopSlots:
    """The exact k best slots of every example. Among equal scores the earlier slot comes first."""

    def __init__(self, k: int, examples: int, score: Score, order: Order) -> None:
        self.k = k
        self.score: Score = score
        self.order: Order = order
        self.key = torch.full((examples, k), -torch.inf, dtype=torch.float64)
        self.slot = torch.full((examples, k), -1, dtype=torch.int64)
        self.scores = torch.full((examples, k), torch.nan, dtype=torch.float64)
        """The scores of these slots."""

    def add(self, scores: Scores) -> None:
        """Add the slots that beat the worst of the current best."""
        self.add_values(scores.first, scores[self.score], scores.ids)

    def add_values(self, first: int, values: Float[Tensor, "n m"], slots: Int[np.ndarray, " m"]) -> None:
        """The same, from the values of a score for consecutive examples and for these slots."""
        key = values
        if self.order != "largest":
            key = key.neg() if self.order == "smallest" else key.abs()
        rows = slice(first, first + len(key))
        better = self._better(key, self.key[rows, -1].to(key.dtype))
        if better is None:
            return
        row, column, value = better
        rows, row_numbers = (first + row).unique_consecutive(return_inverse=True)
        ids = torch.from_numpy(slots[column.numpy()])
        self._merge(rows, row_numbers, value.double(), ids, values[row, column].double())

    def _better(
        self, key: Float[Tensor, "n m"], worst: Float[Tensor, " n"]
    ) -> tuple[Int[Tensor, " c"], Int[Tensor, " c"], Float[Tensor, " c"]] | None:
        """Row, column and value of the entries that are better than the worst, at most about k of them for each row.

        Most stretches of a row contain no such entry, which their maximum shows.
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
            bar = bar.maximum(
                least.nextafter(least.new_tensor(-torch.inf))
            )  # equal entries stay: the earlier slot wins
        candidates = []
        for (begin, part), peak in zip(parts, peaks, strict=True):
            row, stretch = torch.nonzero(peak > bar, as_tuple=True)
            if len(row):
                values = part[row, stretch]
                line, column = torch.nonzero(values > bar[row], as_tuple=True)
                candidates.append((row[line], begin + stretch[line] * size + column, values[line, column]))
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        row, column, value = (torch.cat(tensors) for tensors in zip(*candidates, strict=True))
        order = row.argsort(stable=True)
        return row[order], column[order], value[order]

    def _merge(
        self, rows: Int[Tensor, " r"], row_numbers: Int[Tensor, " c"], values: Float[Tensor, " c"],
        ids: Int[Tensor, " c"], scores: Float[Tensor, " c"],
    ) -> None:  # fmt: skip
        """Keep the best of the current slots and the new ones, in the order of training where they are equal.

        ``row_numbers`` says to which of the rows each new slot belongs.
        """
        current = torch.arange(len(rows)).repeat_interleave(self.k)
        row, value, slot, score = (
            torch.cat(pair)
            for pair in (
                (current, row_numbers),
                (self.key[rows].flatten(), values),
                (self.slot[rows].flatten(), ids),
                (self.scores[rows].flatten(), scores),
            )
        )
        order = slot.argsort(stable=True)
        order = order[value[order].argsort(descending=True, stable=True)]
        order = order[row[order].argsort(stable=True)]
        begin = torch.searchsorted(row[order], torch.arange(len(rows)))
        best = order[begin.unsqueeze(1) + torch.arange(self.k)]
        self.key[rows], self.slot[rows], self.scores[rows] = value[best], slot[best], score[best]


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
        """Add the slots that beat the worst of the current best of their group."""
        values, group = scores[self.score], scores.by_slot(self.group_of)
        order = np.argsort(group, kind="stable")
        names, begins = np.unique(group[order], return_index=True)
        for name, columns in zip(names.tolist(), np.split(order, begins[1:]), strict=True):
            self.best[name].add_values(scores.first, values[:, torch.from_numpy(columns)], scores.ids[columns])
