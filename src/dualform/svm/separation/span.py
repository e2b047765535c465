r"""How much of a matrix the logits of some tokens and queries can see.

.. math:: S = \mathrm{span}\{(x_{it} - x_{iu})\, z_i^\top\}

Whatever part of W lies outside S changes no attention weight on these inputs; a gradient on them never leaves S. The
part inside is the smallest matrix with the same logits, up to a constant for each query. Conjugate gradients find it
from the constraints themselves, which are never written out as vectors.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .constraint_rows import Array, ConstraintRows
from .problem import Problem

ROUNDS, ENOUGH, CLOSE = 1000, 1e-12, 1e-6
"""Steps at most; the size of the slope, beside the first, at which they end; and what may be missed in the end."""

DENSE = 2_000_000
"""Numbers that constraints may be, written out as vectors, where they are solved at once."""


class Smallest(NamedTuple):
    """The smallest W that comes closest to meeting equations, as M(λ), and by how much it misses each."""

    W: Float[Array, "x z"]
    multipliers: Float[Array, " r"]
    missed: Float[Array, " r"]


def smallest(rows: ConstraintRows, target: Float[Array, " r"]) -> Smallest:
    """The smallest W with δᵀWz = target for every row, or as nearly as there is one.

    Where there is none, what is missed is orthogonal to all that a W can do: M(missed) = 0.
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
    return Smallest(W, multipliers, missed)


def inside(problem: Problem, W: Float[Tensor, "x z"]) -> Float[Tensor, "x z"] | None:
    """The part of W in S; None where conjugate gradients do not find it: tokens may lie almost in fewer dimensions."""
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
        return problem.whole((kept.mT @ (kept @ W.flatten())).view_as(W).numpy())
    target = rows.margins(small)
    found = smallest(rows, target)
    if np.abs(found.missed).max() > CLOSE * np.abs(target).max():
        return None
    return problem.whole(found.W)
