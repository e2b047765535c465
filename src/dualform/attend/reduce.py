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
        self.key = np.full((examples, k), -np.inf)
        self.slot = np.full((examples, k), -1, np.int64)

    def add(self, slots: Slots, scores: Scores) -> None:
        """Look for slots of this block that beat the worst of the best."""
        key = scores[self.score]
        if self.order != "largest":
            key = key.neg() if self.order == "smallest" else key.abs()
        worst = torch.from_numpy(self.key[scores.first : scores.first + key.shape[0], -1]).to(key.dtype)
        rows = torch.nonzero(key.amax(1) > worst).flatten()
        if not len(rows):
            return
        key, worst = key[rows], worst[rows]
        if key.shape[1] > self.k:
            worst = torch.maximum(worst, key.topk(self.k, dim=1).values[:, -1])
        found = torch.nonzero(key >= worst.unsqueeze(1))
        values = key[found[:, 0], found[:, 1]].double().numpy()
        ids, ends = slots.ids[found[:, 1].numpy()], np.searchsorted(found[:, 0].numpy(), np.arange(len(rows) + 1))
        for i, row in enumerate(rows.tolist()):
            self._merge(scores.first + row, values[ends[i] : ends[i + 1]], ids[ends[i] : ends[i + 1]])

    def _merge(self, row: int, values: np.ndarray, ids: np.ndarray) -> None:
        values, ids = np.concatenate([self.key[row], values]), np.concatenate([self.slot[row], ids])
        best = np.lexsort((ids.astype(np.uint64), -values))[: self.k]  # as unsigned, −1 (nothing yet) comes last
        self.key[row], self.slot[row] = values[best], ids[best]


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
            member = torch.zeros(len(group), self.groups, dtype=values.dtype)
            member[torch.arange(len(group)), torch.from_numpy(group)] = 1
            total += values @ member
            return
        order = np.argsort(group, kind="stable")
        names, begins = np.unique(group[order], return_index=True)
        sums = torch.nn.functional.embedding_bag(
            torch.from_numpy(order), values.mT.contiguous(), torch.from_numpy(begins), mode="sum"
        )  # runs of one group, added row by row
        total[:, torch.from_numpy(names)] += sums.mT
