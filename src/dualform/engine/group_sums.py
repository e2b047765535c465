"""Sums of scores over groups of slots, added up block by block."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.store import Block
from dualform.types import Score

from .scan import Scores

FEW = 64
"""Up to this many groups a sum is one matrix product with their membership; beyond that, rows are sorted by group and
added in runs."""


class GroupSums:
    """Sums of a score over groups of slots, per example. ``group_of`` gives the group of each slot of a block."""

    def __init__(
        self, groups: int, examples: int, score: Score, group_of: Callable[[Block], Int[np.ndarray, " m"]]
    ) -> None:
        self.groups, self.group_of = groups, group_of
        self.score: Score = score
        self.total: Float[Tensor, "n G"] = torch.zeros(examples, groups, dtype=torch.float64)

    def add(self, scores: Scores) -> None:
        """Add the scores to their groups."""
        values = scores[self.score]
        total = self.total[scores.first : scores.first + values.shape[0]]
        group = scores.by_slot(self.group_of)
        if self.groups <= FEW:
            member = torch.eye(self.groups, dtype=values.dtype)[torch.from_numpy(group)]
            total += (member.mT @ values.mT).mT  # faster than the product of the transposes
            return
        order = np.argsort(group, kind="stable")
        names, begins = np.unique(group[order], return_index=True)
        sums = torch.nn.functional.embedding_bag(
            torch.from_numpy(order), values.mT.contiguous(), torch.from_numpy(begins), mode="sum"
        )  # runs of one group, added row by row
        total[:, torch.from_numpy(names)] += sums.mT
