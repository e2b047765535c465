r"""Newton's steps among the rows that hold the margin up, and the proof that nothing can.

With the multipliers that are neither at zero nor at their bound free, the dual problem is a linear system. Coordinate
descent finds which ones these are; solving for them ends what descent alone would take long to finish:

.. math:: G_{FF}\,\delta = (b - G\lambda)_F,\qquad G_{rs} = (z_{i(r)}\cdot z_{i(s)})(\delta_r\cdot\delta_s)

If no W meets the constraints, the system has no solution and :math:`\delta` grows along some :math:`\lambda \ge 0` with
:math:`M(\lambda) = 0` and :math:`b^\top\lambda > 0`: such multipliers are the certificate.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from .constraint_rows import Array, ConstraintRows

LARGEST = 4096
"""Rows that a system may have."""

GROWING = 500
"""Rows that a proof is looked for among, where there are too many for a system."""

NOTHING = 1e-10
"""What is left of M(λ), relative to the sum of the sizes of its terms, where it counts as zero."""

RIDGE = 1e-14
"""What is added to the diagonal, relative to it, so that singular systems have a solution."""


class FaceStep(NamedTuple):
    """Multipliers after some steps, or ones that prove that there is no solution."""

    multipliers: Float[Array, " r"]
    proof: Float[Array, " r"] | None


def climb(
    rows: ConstraintRows, multipliers: Float[Array, " r"], high: float = np.inf, ridge: float = 0.0, *, steps: int = 100
) -> FaceStep:
    """Solve the dual problem among few rows from where it is; each step makes it better, or ends in a proof."""
    size = np.sqrt(rows.curvature)
    gram = rows.gram() / size / size[:, None]
    gram[np.diag_indices(len(gram))] += ridge / size**2
    x, low, top, target = multipliers * size, rows.low, high * size, rows.target / size
    top = np.where(rows.equal, np.inf, top)
    slope, free, careful = target - gram @ x, (x > low) & (x < top), False
    for _ in range(steps):
        way = np.zeros_like(x)
        way[free] = _solved(gram[np.ix_(free, free)], slope[free])
        if np.isinf(high) and not ridge and _endless(gram, way, target):
            way[free] = _solved(gram[np.ix_(free, free)], way[free])  # what is not in the null space all but vanishes
            if (way[~rows.equal] >= -1e-12 * np.abs(way).max()).all():
                return FaceStep(x / size, np.where(rows.equal, way, way.clip(0)) / size)
        old = x
        x, slope, whole = _moved(gram, x, slope, way, low, top)
        free &= (x > low) & (x < top)
        if whole or not free.any():
            wrong = np.where(x <= low, slope, np.where(x >= top, -slope, 0.0))
            if wrong.max() <= 1e-12 * np.abs(target).max():
                break
            # one row at a time always makes it better, all at once mostly does and is sooner done
            free |= wrong == wrong.max() if careful else wrong > 0
        careful = bool((x == old).all())
    return FaceStep(x / size, None)


def cost(rows: int) -> float:
    """Operations of one step, as many as coordinate descent does in its time: a factorisation runs faster."""
    return rows**3 / 12 + 20 * rows**2


def proved(rows: ConstraintRows, at: Int[Array, " s"], proof: Float[Array, " s"]) -> Float[Array, " r"] | None:
    """Multipliers of some rows for all of them, weighted to 1, if M(λ) is nothing beside its terms; else nothing."""
    for least in (1e-6, 0.0):  # few rows are easier to read, if they are enough
        whole = np.zeros(len(rows))
        whole[at] = np.where(np.abs(proof) > least * np.abs(proof).max(), proof, 0.0)
        left, terms = float(np.linalg.norm(rows.combine(whole))), float(np.abs(whole) @ np.sqrt(rows.curvature))
        if left <= NOTHING * terms and rows.target @ whole > 0:
            return whole / (rows.target @ whole)
    return None


def among_growing(rows: ConstraintRows, growth: Float[Array, " r"]) -> Float[Array, " r"] | None:
    """A proof among the rows whose multipliers grow most: where there is no solution, some grow for ever."""
    most = np.sort(np.argsort(-np.abs(growth))[:GROWING])
    most = most[(growth[most] > 0) | rows.equal[most] & (growth[most] != 0)]
    proof = climb(rows.pick(most), growth[most]).proof if len(most) else None
    return None if proof is None else proved(rows, most, proof)


def empty_row(rows: ConstraintRows) -> Float[Array, " r"] | None:
    """A row of zeros that asks for something, as where two tokens are the same, is a proof by itself."""
    empty = np.flatnonzero((rows.curvature == 0) & (rows.target != 0))[:1]
    return proved(rows, empty, rows.target[empty]) if len(empty) else None


def _solved(gram: Float[Array, "f f"], slope: Float[Array, " f"]) -> Float[Array, " f"]:
    """The solution, with the ridge that it needs."""
    matrix, identity, ridge = torch.from_numpy(gram), torch.eye(len(gram), dtype=torch.float64), RIDGE
    factor, failed = torch.linalg.cholesky_ex(matrix + ridge * identity)
    while bool(failed):
        ridge *= 100
        factor, failed = torch.linalg.cholesky_ex(matrix + ridge * identity)
    return torch.cholesky_solve(torch.from_numpy(slope).unsqueeze(1), factor).squeeze(1).numpy()


def _moved(
    gram: Float[Array, "r r"], x: Float[Array, " r"], slope: Float[Array, " r"], way: Float[Array, " r"],
    low: Float[Array, " r"], top: Float[Array, " r"],
) -> tuple[Float[Array, " r"], Float[Array, " r"], bool]:  # fmt: skip
    """A step that makes it better: cut off at the bounds as a whole, or as far as the first bound on its way."""
    goal = np.clip(x + way, low, top)
    step = goal - x
    bend = gram @ step
    whole = bool((goal == x + way).all())
    if not whole and step @ slope - step @ bend / 2 <= 0:
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(way > 0, (top - x) / way, np.where(way < 0, (low - x) / way, np.inf))
        length = max(0.0, float(room.min()))
        goal = np.where(room <= length, np.where(way > 0, top, low), x + length * way)
        bend = gram @ (goal - x)
    return goal, slope - bend, whole


def _endless(gram: Float[Array, "r r"], way: Float[Array, " r"], target: Float[Array, " r"]) -> bool:
    """Whether the dual problem seems to grow for ever in a direction; ``proved`` forms M(λ) itself, and knows."""
    left = max(0.0, float(way @ gram @ way)) ** 0.5
    return float(target @ way) > 0 and left <= 1e-6 * float(np.abs(way).sum())
