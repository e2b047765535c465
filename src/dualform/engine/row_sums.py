"""Sums of contributions over groups of slots, apart for every row of the queries."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.store import Block
from dualform.types import Score

from .scan import Scores


class RowSums:
    """What groups of slots add through each row of the queries, and what finer groups add through all rows together.

    ``group_of`` gives the group of each slot of a block, ``place_of`` its finer group. Each row must be a query of its
    own (``per_example`` = 1).
    """

    score: Score = "contribution"

    def __init__(
        self, rows: int, groups: int, group_of: Callable[[Block], Int[np.ndarray, " m"]], places: int,
        place_of: Callable[[Block], Int[np.ndarray, " m"]],
    ) -> None:  # fmt: skip
        self.group_of, self.place_of = group_of, place_of
        self.by_row: Float[Tensor, "r G"] = torch.zeros(rows, groups, dtype=torch.float64)
        self.by_place: Float[Tensor, " P"] = torch.zeros(places, dtype=torch.float64)

    def add(self, scores: Scores) -> None:
        """Add the contributions of more slots."""
        values = scores[self.score].double()
        groups, places = (torch.from_numpy(scores.by_slot(number)) for number in (self.group_of, self.place_of))
        self.by_row[scores.first : scores.first + len(values)].index_add_(1, groups, values)
        self.by_place.index_add_(0, places, values.sum(0))
