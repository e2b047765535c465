"""The counterfactual curve: what happens to a target when the strongest examples go, a few or many of them?

Better scores find the examples without which the target falls most; random examples show what any removal does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError, require

from .bootstrap import interval_of_mean
from .removal_runs import Retrains, train_each, without
from .scores import ScoreMatrix, as_matrix

COUNTS = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class RemovalCurve:
    """The change of each query's target without its top examples, for growing numbers of them, and without random ones.

    Intervals are of the mean over queries, by bootstrap over queries.
    """

    counts: tuple[int, ...]
    changes: Float[Tensor, "queries counts"]
    random: Float[Tensor, "queries counts"]
    """The mean change over several random subsets of the same size, which all queries share."""

    @property
    def mean(self) -> Float[Tensor, " counts"]:
        return self.changes.mean(0)

    def intervals(self, seed: int = 0) -> list[tuple[float, float]]:
        """A 95 % interval of the mean change for each number of examples."""
        return [interval_of_mean(column, seed) for column in self.changes.mT]

    def __str__(self) -> str:
        low, high = self.intervals()[-1]
        return (
            f"Without the top {self.counts[-1]} examples the target of a query changes by {float(self.mean[-1]):+.3f} "
            f"on average (95 % interval {low:+.3f} to {high:+.3f}, {len(self.changes)} queries), without as many "
            f"random ones by {float(self.random[:, -1].mean()):+.3f}."
        )

    def to_pandas(self) -> Any:
        """A table with one line for each number of examples."""
        pandas = require("pandas", "pandas")
        low, high = zip(*self.intervals(), strict=True)
        return pandas.DataFrame(
            {"removed": self.counts, "change": self.mean.numpy(), "low": low, "high": high,
             "random": self.random.mean(0).numpy()}
        )  # fmt: skip


def subset_removal(
    scores: ScoreMatrix, retrain: Retrains, counts: Sequence[int] = COUNTS, draws: int = 3, seed: int = 0
) -> RemovalCurve:
    """Leave out the top 1, 2, 5, … examples of each query, train again, and compare with ``draws`` random subsets.

    It takes (queries + draws) × len(counts) + 1 trainings; equal subsets are trained once if ``retrain`` comes from
    ``run.retraining(…)``.
    """
    matrix = as_matrix(scores)
    queries, examples = matrix.shape
    counts = tuple(sorted({count for count in counts if count <= examples}))
    if not counts or counts[0] < 1 or draws < 1:
        raise QueryError(f"counts must hold numbers from 1 to {examples}, and draws={draws} must be 1 or more.")
    generator = torch.Generator().manual_seed(seed)
    orders = [
        *matrix.argsort(1, descending=True),
        *(torch.randperm(examples, generator=generator) for _ in range(draws)),
    ]
    weights = [without(order, count, examples) for order in orders for count in counts]
    values = train_each(retrain, torch.stack([*weights, torch.ones(examples)])).double()
    changes = (values[:-1] - values[-1]).reshape(len(orders), len(counts), -1)
    own = changes[torch.arange(queries), :, torch.arange(queries)]
    return RemovalCurve(counts, own, changes[queries:].mean(0).mT)
