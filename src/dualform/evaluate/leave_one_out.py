"""Leaving out one example at a time: the predicted change of a target beside the real one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import QueryError, require

from .bootstrap import interval_of_mean
from .ranks import spearman
from .removal_runs import Retrains, train_each
from .scores import ScoreMatrix, as_matrix


@dataclass(frozen=True)
class LeaveOneOut:
    """The change of each query's target when each of its strongest examples is left out alone.

    ``low`` and ``high`` bound the mean rank correlation: a 95 % interval by bootstrap over queries. It iterates over
    ``predicted, real`` of query 0, for one query asked alone.
    """

    queries: Int[Tensor, " queries"]
    examples: Int[Tensor, "queries k"]
    predicted: Float[Tensor, "queries k"]
    real: Float[Tensor, "queries k"]
    correlation: float
    low: float
    high: float

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.predicted[0], self.real[0]))

    def __str__(self) -> str:
        right = float((self.predicted.sign() == self.real.sign()).double().mean())
        within = "" if len(self.queries) == 1 else f" (95 % interval {self.low:.3f} to {self.high:.3f})"
        return (
            f"Each of the {self.examples.shape[1]} strongest examples of {len(self.queries)} queries was left out "
            f"alone: the predicted change has the right sign {right:.0%} of the time, and a rank correlation of "
            f"{self.correlation:.3f}{within} with the real one."
        )

    def to_pandas(self) -> Any:
        """A table with one line for each query and example."""
        pandas = require("pandas", "pandas")
        count = self.examples.shape[1]
        columns = {"query": self.queries.repeat_interleave(count), "example": self.examples.flatten()}
        columns |= {"predicted": self.predicted.flatten(), "real": self.real.flatten()}
        return pandas.DataFrame({name: values.numpy() for name, values in columns.items()})


def leave_one_out(
    scores: ScoreMatrix, retrain: Retrains, query: int | None = None, strongest: int = 20, seed: int = 0
) -> LeaveOneOut:
    """Train again without each of the ``strongest`` examples of every query (or of one), one at a time.

    An example that is among the strongest of several queries is left out once. Scores of one query alone (a line)
    are about query 0, or about the one that is named.
    """
    if isinstance(scores, Tensor | np.ndarray) and scores.ndim == 1:
        matrix, query = as_matrix(scores[None]), query or 0
    else:
        matrix = as_matrix(scores)
        matrix = matrix if query is None else matrix[query : query + 1]
    if strongest < 1:
        raise QueryError(f"strongest={strongest} must be 1 or more: the examples that are left out for each query.")
    chosen = matrix.abs().topk(min(strongest, matrix.shape[1])).indices
    examples, places = chosen.unique(return_inverse=True)
    weights = torch.ones(len(examples) + 1, matrix.shape[1])
    weights[torch.arange(len(examples)), examples] = 0.0  # the last line leaves out nothing
    values = train_each(retrain, weights).double()
    queries = torch.arange(len(matrix)) if query is None else torch.tensor([query])
    real = (values[:-1] - values[-1])[places, queries[:, None]]
    predicted = -matrix.gather(1, chosen)
    per_query = spearman(predicted, real)
    low, high = interval_of_mean(per_query, seed)
    return LeaveOneOut(queries, chosen, predicted, real, float(per_query.nanmean()), low, high)
