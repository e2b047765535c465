r"""How much of a matrix the logits of some tokens and queries can see.

.. math:: S = \mathrm{span}\{(x_{it} - x_{iu})\, z_i^\top\}

Whatever part of W lies outside S changes no attention weight on these inputs; a gradient on them never leaves S. The
part inside is the smallest matrix with the same logits, up to a constant for each query. Conjugate gradients find it
from the constraints themselves, which are never written out as vectors.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from .problem import Problem
from .rows import Array, Rows

ROUNDS, ENOUGH = 1000, 1e-12
"""Steps at most, and the size of the slope, beside the first, at which it ends."""


class Smallest(NamedTuple):
    """The smallest W that comes closest to meeting equations, as M(λ), and by how much it misses each."""

    W: Float[Array, "x z"]
    multipliers: Float[Array, " r"]
    missed: Float[Array, " r"]


def smallest(rows: Rows, target: Float[Array, " r"]) -> Smallest:
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


def inside(problem: Problem, W: Float[Tensor, "x z"]) -> Float[Tensor, "x z"]:
    """The part of W in S."""
    if problem.reduce:
        W = W if problem.left is None else problem.left.mT @ W
        W = W if problem.right is None else W @ problem.right
    found = smallest(problem.rows, problem.rows.margins(np.ascontiguousarray(W.numpy())))
    return problem.whole(found.W)
