"""What is kept of the scores as the blocks go by: the best slots, and sums over groups."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.memory import Block
from dualform.types import Order, Score

from .scan import Scores
from .stream import Slots

FEW = 64
"""Up to so many groups a sum is one matrix product with their membership; beyond that rows are sorted and
added in runs."""


class Best:
    """The exact k best slots of every example. Equal scores keep the order of training: the earlier slot first."""

    def __init__(self, k: int, examples: int, score: Score, order: Order) -> None:
        self.k = k
        self.score: Score = score
        self.order: Order = order
        self.key = torch.full((examples, k), -torch.inf, dtype=torch.float64)
        self.slot = torch.full((examples, k), -1, dtype=torch.int64)

    def add(self, slots: Slots, scores: Scores) -> None:
        """Look for slots of this block that beat the worst of the best."""
        key = scores[self.score]
        if self.order != "largest":
            key = key.neg() if self.order == "smallest" else key.abs()
        first, ids = scores.first, torch.from_numpy(slots.ids)
        rows = torch.nonzero(key.amax(1) > self.key[first : first + len(key), -1]).flatten()
        if not len(rows):
            return
        key = key[rows]
        if key.shape[1] > self.k:
            found = key.topk(self.k, dim=1)
            tied = (key >= found.values[:, -1:]).sum(1) > self.k
            where, order = found.indices.sort(1)  # in the order of training, so that equal scores keep it
            best = found.values.gather(1, order)
            self._merge(first + rows[~tied], best[~tied], ids[where[~tied]])
            for i in torch.nonzero(tied).flatten().tolist():  # more slots tie for the last place than there is room
                self._merge(first + rows[i : i + 1], key[i : i + 1], ids.unsqueeze(0))
        else:
            self._merge(first + rows, key, ids.expand(len(rows), -1))

    def _merge(self, rows: Int[Tensor, " r"], values: Float[Tensor, "r m"], ids: Int[Tensor, "r m"]) -> None:
        """Keep the best of what was kept and what is new, both in the order of training where they are equal."""
        values, ids = torch.cat([self.key[rows], values.double()], 1), torch.cat([self.slot[rows], ids], 1)
        values, best = values.sort(dim=1, descending=True, stable=True)
        self.key[rows], self.slot[rows] = values[:, : self.k], ids.gather(1, best[:, : self.k])


class GroupSums:
    """Sums of a score over groups of slots, per example. ``group_of`` gives the group of each slot of a block."""

    def __init__(
        self, groups: int, examples: int, score: Score, group_of: Callable[[Block], Int[np.ndarray, " m"]]
    ) -> None:
        self.groups, self.group_of = groups, group_of
        self.score: Score = score
        self.total: Float[Tensor, "n G"] = torch.zeros(examples, groups, dtype=torch.float64)

    def add(self, slots: Slots, scores: Scores) -> None:
        """Add the scores of this block to their groups."""
        values = scores[self.score]
        total = self.total[scores.first : scores.first + values.shape[0]]
        group = self.group_of(slots.block)
        if self.groups <= FEW:
            total += values @ torch.eye(self.groups, dtype=values.dtype)[torch.from_numpy(group)]
            return
        order = np.argsort(group, kind="stable")
        names, begins = np.unique(group[order], return_index=True)
        sums = torch.nn.functional.embedding_bag(
            torch.from_numpy(order), values.mT.contiguous(), torch.from_numpy(begins), mode="sum"
        )  # runs of one group, added row by row
        total[:, torch.from_numpy(names)] += sums.mT
