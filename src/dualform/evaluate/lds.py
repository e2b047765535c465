r"""The linear datamodeling score: do scores rank what training without some examples gives?

For random subsets S of the training set, the network is really trained again on S alone. Scores predict a target by
their sum over S, and

.. math:: \mathrm{LDS}(q) =
    \mathrm{Spearman}_S\Big(\sum_{i \in S} \mathrm{score}_{qi},\; \varphi_q(\theta^\star(S))\Big)

(Ilyas et al. 2022, arXiv 2202.00622; Park et al. 2023, arXiv 2303.14186). A score is signed like a contribution:
positive where the example speaks for the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import require

from .bootstrap import percentiles
from .ranks import spearman
from .removal_runs import RemovalRuns, average_runs
from .scores import ScoreMatrix, as_matrix, require_shape

NUMBERS = 1 << 20
"""How many numbers the bootstrap draws into memory at a time."""


@dataclass(frozen=True)
class Correlation:
    """A rank correlation of each query, their mean, and a 95 % interval of that mean.

    The interval is by bootstrap over queries and over subsets together: other queries could have been asked, and other
    subsets, which all queries share, left out.
    """

    mean: float
    low: float
    high: float
    per_query: Float[Tensor, " queries"]
    subsets: int

    def __str__(self) -> str:
        return (
            f"{self.mean:.3f} (95 % interval {self.low:.3f} to {self.high:.3f}, "
            f"{len(self.per_query)} queries, {self.subsets} subsets)"
        )

    def to_pandas(self) -> Any:
        pandas = require("pandas", "pandas")
        return pandas.DataFrame({"query": range(len(self.per_query)), "lds": self.per_query.numpy()})


def lds(
    scores: ScoreMatrix, runs: RemovalRuns | Sequence[RemovalRuns], seed: int = 0, samples: int = 500
) -> Correlation:  # fmt: skip
    """The linear datamodeling score of scores of any origin.

    Lists are averaged: ``lds([scores_0, scores_1], [runs_0, runs_1])`` for networks with several seeds, whose
    runs left out the same subsets. ``samples`` is how often the bootstrap draws.
    """
    truth = runs if isinstance(runs, RemovalRuns) else average_runs(runs)
    matrix = as_matrix(scores)
    require_shape(matrix, truth.values.shape[1], truth.weights.shape[1])
    predicted, real = matrix @ truth.weights.double().mT, truth.values.double().mT
    per_query = spearman(predicted, real)
    draws = _bootstrap(predicted, real, torch.Generator().manual_seed(seed), samples)
    return Correlation(float(per_query.nanmean()), *percentiles(draws), per_query, len(truth))


def _bootstrap(
    predicted: Float[Tensor, "queries runs"], real: Float[Tensor, "queries runs"], generator: torch.Generator,
    samples: int,
) -> Float[Tensor, " samples"]:  # fmt: skip
    """The mean correlation of drawn queries over drawn subsets, again and again."""
    queries, runs = predicted.shape
    lines = torch.randint(queries, (samples, queries, 1), generator=generator)
    columns = torch.randint(runs, (samples, 1, runs), generator=generator)
    at_once = max(1, NUMBERS // predicted.numel())
    means = [
        spearman(predicted[some_lines, some_columns], real[some_lines, some_columns]).nanmean(-1)
        for some_lines, some_columns in zip(lines.split(at_once), columns.split(at_once), strict=True)
    ]
    return torch.cat(means)
