r"""Newton's steps among the rows that support the margin, and proofs that no W separates the tokens.

Restricted to the multipliers that are neither zero nor at their bound, the dual problem is a linear system. Coordinate
descent finds which multipliers these are; solving for them finishes what descent alone would take long for:

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
"""The most rows that a linear system may have."""

GROWING = 500
"""How many rows to search for a proof, where there are too many for one system."""

CANCELLED = 1e-10
"""M(λ) counts as zero if its norm, divided by the sum of the norms of its terms, is at most this."""

RIDGE = 1e-14
"""Added to the diagonal, relative to it, so that singular systems have a solution."""


class FaceStep(NamedTuple):
    """Multipliers after Newton's steps; ``proof`` has multipliers that prove that there is no solution."""

    multipliers: Float[Array, " r"]
    proof: Float[Array, " r"] | None


def newton_on_face(
    rows: ConstraintRows, multipliers: Float[Array, " r"], high: float = np.inf, ridge: float = 0.0, *, steps: int = 100
) -> FaceStep:
    """Improve the multipliers of a few rows by Newton's steps; each raises the dual objective or ends in a proof."""
    size = np.sqrt(rows.curvature)
    gram = rows.gram() / size / size[:, None]
    gram[np.diag_indices(len(gram))] += ridge / size**2
    x, low, top, target = multipliers * size, rows.low, high * size, rows.target / size
    top = np.where(rows.equal, np.inf, top)
    slope, free, careful = target - gram @ x, (x > low) & (x < top), False
    for _ in range(steps):
        way = np.zeros_like(x)
        way[free] = _solve_free(gram[np.ix_(free, free)], slope[free])
        if np.isinf(high) and not ridge and _seems_unbounded(gram, way, target):
            # solving again all but removes what is not in the null space
            way[free] = _solve_free(gram[np.ix_(free, free)], way[free])
            if (way[~rows.equal] >= -1e-12 * np.abs(way).max()).all():
                return FaceStep(x / size, np.where(rows.equal, way, way.clip(0)) / size)
        old = x
        x, slope, unclipped = _bounded_step(gram, x, slope, way, low, top)
        free &= (x > low) & (x < top)
        if unclipped or not free.any():
            wrong = np.where(x <= low, slope, np.where(x >= top, -slope, 0.0))
            if wrong.max() <= 1e-12 * np.abs(target).max():
                break
            # freeing one row at a time always improves the objective; all at once usually does, and takes fewer steps
            free |= wrong == wrong.max() if careful else wrong > 0
        careful = bool((x == old).all())
    return FaceStep(x / size, None)


def step_cost(rows: int) -> float:
    """The cost of one step in operations of coordinate descent, which are slower than those of a factorisation."""
    return rows**3 / 12 + 20 * rows**2


def checked_proof(rows: ConstraintRows, at: Int[Array, " s"], proof: Float[Array, " s"]) -> Float[Array, " r"] | None:
    """Multipliers of all rows, scaled to bᵀλ = 1, if their M(λ) vanishes beside its terms; otherwise None."""
    for least in (1e-6, 0.0):  # a proof with few rows is easier to read, so try that first
        all_multipliers = np.zeros(len(rows))
        all_multipliers[at] = np.where(np.abs(proof) > least * np.abs(proof).max(), proof, 0.0)
        left, terms = (
            float(np.linalg.norm(rows.combine(all_multipliers))),
            float(np.abs(all_multipliers) @ np.sqrt(rows.curvature)),
        )
        if left <= CANCELLED * terms and rows.target @ all_multipliers > 0:
            return all_multipliers / (rows.target @ all_multipliers)
    return None


def proof_among_growing(rows: ConstraintRows, growth: Float[Array, " r"]) -> Float[Array, " r"] | None:
    """Search for a proof among the rows whose multipliers grow most: without a solution some grow without bound."""
    most = np.sort(np.argsort(-np.abs(growth))[:GROWING])
    most = most[(growth[most] > 0) | rows.equal[most] & (growth[most] != 0)]
    proof = newton_on_face(rows.pick(most), growth[most]).proof if len(most) else None
    return None if proof is None else checked_proof(rows, most, proof)


def proof_by_empty_row(rows: ConstraintRows) -> Float[Array, " r"] | None:
    """A proof by a single row of zeros with a target that is not zero, as from two equal tokens; None without one."""
    empty = np.flatnonzero((rows.curvature == 0) & (rows.target != 0))[:1]
    return checked_proof(rows, empty, rows.target[empty]) if len(empty) else None


def _solve_free(gram: Float[Array, "f f"], slope: Float[Array, " f"]) -> Float[Array, " f"]:
    """Solve a system with the smallest ridge that makes it positive definite."""
    matrix, identity, ridge = torch.from_numpy(gram), torch.eye(len(gram), dtype=torch.float64), RIDGE
    factor, failed = torch.linalg.cholesky_ex(matrix + ridge * identity)
    while bool(failed):
        ridge *= 100
        factor, failed = torch.linalg.cholesky_ex(matrix + ridge * identity)
    return torch.cholesky_solve(torch.from_numpy(slope).unsqueeze(1), factor).squeeze(1).numpy()


def _bounded_step(
    gram: Float[Array, "r r"], x: Float[Array, " r"], slope: Float[Array, " r"], way: Float[Array, " r"],
    low: Float[Array, " r"], top: Float[Array, " r"],
) -> tuple[Float[Array, " r"], Float[Array, " r"], bool]:  # fmt: skip
    """A step that improves the objective: clipped to the bounds or, if that fails, up to the first bound on its way.

    Also returns the new slope, and whether the step was taken without clipping.
    """
    goal = np.clip(x + way, low, top)
    step = goal - x
    bend = gram @ step
    unclipped = bool((goal == x + way).all())
    if not unclipped and step @ slope - step @ bend / 2 <= 0:
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(way > 0, (top - x) / way, np.where(way < 0, (low - x) / way, np.inf))
        length = max(0.0, float(room.min()))
        goal = np.where(room <= length, np.where(way > 0, top, low), x + length * way)
        bend = gram @ (goal - x)
    return goal, slope - bend, unclipped


def _seems_unbounded(gram: Float[Array, "r r"], way: Float[Array, " r"], target: Float[Array, " r"]) -> bool:
    """Whether the dual objective seems unbounded in a direction; ``checked_proof`` makes sure, from M(λ) itself."""
    left = max(0.0, float(way @ gram @ way)) ** 0.5
    return float(target @ way) > 0 and left <= 1e-6 * float(np.abs(way).sum())
