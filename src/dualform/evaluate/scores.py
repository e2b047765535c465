"""Scores of any origin: a matrix (query, example), signed like a contribution (positive: speaks for the target)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError
from dualform.explain import Influence

ScoreMatrix = Tensor | np.ndarray | Influence | Sequence[Any]
"""A matrix (query, example) of torch or numpy, an answer of a replayed run, or a list of these, which is averaged."""


def as_matrix(scores: ScoreMatrix) -> Float[Tensor, "queries examples"]:
    """Scores as a matrix in float64 on the CPU."""
    if isinstance(scores, Influence):
        scores = scores.values
    if isinstance(scores, list | tuple) and scores and not isinstance(scores[0], int | float):
        return average(scores)
    matrix = torch.as_tensor(scores).detach().cpu().double()
    if matrix.ndim != 2:
        raise QueryError(f"scores have shape {tuple(matrix.shape)}: pass one line a query, with one number an example.")
    if not bool(matrix.isfinite().all()):
        place = (~matrix.isfinite()).nonzero()[0].tolist()
        raise QueryError(f"the score of query {place[0]} and example {place[1]} is {float(matrix[tuple(place)])}.")
    return matrix


def average(scores: Sequence[ScoreMatrix]) -> Float[Tensor, "queries examples"]:
    """The mean of several scores of the same queries and examples, such as those of networks with other seeds."""
    matrices = [as_matrix(part) for part in scores]
    shapes = {tuple(matrix.shape) for matrix in matrices}
    if len(shapes) != 1:
        raise QueryError(f"cannot average scores of the shapes {sorted(shapes)}: they must be of one shape.")
    return torch.stack(matrices).mean(0)


def require_shape(matrix: Float[Tensor, "queries examples"], queries: int, examples: int) -> None:
    """Raise unless scores are about these queries and examples."""
    if tuple(matrix.shape) != (queries, examples):
        raise QueryError(
            f"scores have shape {tuple(matrix.shape)}, and the runs are about {queries} queries and {examples} "
            "examples: pass one line a query, with one number an example."
        )
