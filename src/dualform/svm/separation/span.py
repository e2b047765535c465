r"""The part of a matrix that the logits of given tokens and queries depend on.

.. math:: S = \mathrm{span}\{(x_{it} - x_{iu})\, z_i^\top\}

The part of W outside S changes no attention weight on these inputs, and a gradient on them always lies in S. The part
inside is the matrix of least norm with the same logits, up to a constant for each query. Conjugate gradients find it
from the constraints, which need not be written out as vectors.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .constraint_rows import Array, ConstraintRows
from .problem import Problem

ROUNDS, ENOUGH, CLOSE = 1000, 1e-12, 1e-6
"""The most steps; the slope, relative to the first, at which they end; and the largest relative error of a result."""

DENSE = 2_000_000
"""Constraints with at most this many numbers are written out as vectors and solved directly."""


class LeastNormSolution(NamedTuple):
    """The least-squares solution W of least norm of some equations, as M(λ), and the residual ``missed`` of each."""

    W: Float[Array, "x z"]
    multipliers: Float[Array, " r"]
    missed: Float[Array, " r"]


def least_norm_solution(rows: ConstraintRows, target: Float[Array, " r"]) -> LeastNormSolution:
    """The W of least norm with δᵀWz = target for every row or, if there is none, with the smallest squared residual.

    Then the residual is orthogonal to the range of the equations: M(missed) = 0.
    """
    W, multipliers, missed = np.zeros(rows.shape), np.zeros(len(rows)), target.astype(float)
    slope, ahead = rows.combine(missed), missed.copy()
    way, size = slope.copy(), float(np.square(slope).sum())
    first = size
    for _ in range(ROUNDS):
        if size <= ENOUGH**2 * first:
            break
        change = rows.margins(way)
        step = size / float(change @ change)
        W += step * way
        multipliers += step * ahead
        missed = missed - step * change
        slope = rows.combine(missed)
        size, before = float(np.square(slope).sum()), size
        way, ahead = slope + size / before * way, missed + size / before * ahead
    return LeastNormSolution(W, multipliers, missed)


def project_to_span(problem: Problem, W: Float[Tensor, "x z"]) -> Float[Tensor, "x z"] | None:
    """The part of W in S; None where conjugate gradients fail, as with tokens that almost lie in fewer dimensions."""
    rows = problem.rows
    if problem.reduce:
        W = W if problem.left is None else problem.left.mT @ W
        W = W if problem.right is None else W @ problem.right
    small = np.ascontiguousarray(W.numpy())
    if len(rows) * small.size <= DENSE:
        deltas = rows.points[rows.plus] - rows.points[rows.minus]
        phi = torch.from_numpy(np.einsum("ra,rb->rab", deltas, rows.queries[rows.query]).reshape(len(rows), -1))
        _, singular, across = torch.linalg.svd(phi, full_matrices=False)
        kept = across[singular > 1e-12 * singular[0]]
        return problem.full_matrix((kept.mT @ (kept @ W.flatten())).view_as(W).numpy())
    target = rows.margins(small)
    solution = least_norm_solution(rows, target)
    if np.abs(solution.missed).max() > CLOSE * np.abs(target).max():
        return None
    return problem.full_matrix(solution.W)
