r"""Nuclear norm, the bias of training keys and queries separately: ADMM with two simple steps (arXiv 2308.16898).

.. math:: W = \Pi(V - Y),\qquad V = S_\tau(W + Y),\qquad Y \leftarrow Y + W - V

:math:`\Pi` projects onto the constraints by the same coordinate descent, from a centre that is not zero and from the
multipliers of the previous step; :math:`S_\tau` lowers all singular values by :math:`\tau` and clips them at zero, so V
is exactly of low rank. Both bounds of the optimum are available at any time:

.. math:: \frac{\sum\lambda}{\|M(\lambda)\|_{op}} \le \min\|W\|_* \le \frac{\|V\|_*}{\mu(V)}
"""

import math
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from . import frobenius
from .constraint_rows import Array, ConstraintRows
from .frobenius import SWEEPS, SolverResult, SolverSettings

BEGIN = 0.3
"""The first τ, relative to the largest singular value of the solution in the Frobenius norm."""

RELAXED = 1.6
"""The over-relaxation factor of the step to V."""

EVERY = 10
"""Steps between two updates of the bounds, the penalty and the active rows."""


def solve(
    rows: ConstraintRows,
    settings: SolverSettings,
    begin: Float[Array, " r"] | None = None,
    first: Float[Array, " r"] | None = None,
) -> SolverResult:
    """Solve, starting from the solution in the Frobenius norm, which also decides feasibility."""
    clock = time.perf_counter()
    seed = frobenius.solve(rows, replace(settings, tolerance=1e-2, epochs=20_000), begin, first)
    if math.isinf(seed.upper):
        return seed
    tau = BEGIN * float(np.linalg.norm(seed.W, 2))
    at = _Iterate(seed.W, BEGIN * seed.W, BEGIN * seed.multipliers)
    indices, shuffled, done = np.arange(len(rows)), np.random.default_rng(0), 0
    best = _best_bounds(rows, None, at)
    while best.gap > settings.tolerance and done < settings.epochs and time.perf_counter() - clock < settings.seconds:
        for _ in range(EVERY - 1):
            at = _admm_step(rows, indices, at, tau, shuffled)[1]
        old, (W, at) = at.V, _admm_step(rows, indices, at, tau, shuffled)
        done += EVERY
        best = _best_bounds(rows, best, at)
        apart, moved = (
            float(np.linalg.norm(x)) / float(np.linalg.norm(y)) for x, y in ((W - at.V, W), (at.V - old, at.Y))
        )
        change = 1.0 if moved / 5 < apart < 5 * moved else 1.5 if moved > apart else 1 / 1.5
        tau, at = tau * change, _Iterate(at.V, at.Y * change, at.multipliers * change)
        indices = np.flatnonzero((at.multipliers > 0) | (rows.margins(W) < (1.1 if settings.shrink else np.inf)))
    return replace(best, epochs=done, seconds=time.perf_counter() - clock)


class _Iterate(NamedTuple):
    V: Float[Array, "x z"]
    Y: Float[Array, "x z"]
    multipliers: Float[Array, " r"]


def _admm_step(
    rows: ConstraintRows, indices: Int[Array, " s"], at: _Iterate, tau: float, shuffled: np.random.Generator
) -> tuple[Float[Array, "x z"], _Iterate]:
    """One update of W, V and Y. The projection is approximated by one sweep from the previous multipliers."""
    from .coordinate_descent import descent_sweep

    part, part_multipliers = rows.pick(indices), at.multipliers[indices]
    W = at.V - at.Y + part.combine(part_multipliers)
    descent_sweep(
        part.points, part.queries, part.sizes, part.plus, part.minus, part.start,
        shuffled.permutation(part.busy_queries), part.curvature, part.target, part.low,
        np.full(len(part), np.inf), 0.0, part_multipliers, W, SWEEPS,
    )  # fmt: skip
    ahead = RELAXED * W + (1 - RELAXED) * at.V + at.Y
    left, singular, right = np.linalg.svd(ahead, full_matrices=False)
    V = (left * (singular - tau).clip(0)) @ right
    multipliers = np.zeros(len(rows))
    multipliers[indices] = part_multipliers
    return W, _Iterate(V, ahead - V, multipliers)


def _best_bounds(rows: ConstraintRows, best: SolverResult | None, at: _Iterate) -> SolverResult:
    """The best bounds so far: V gives the upper bound, the multipliers the lower one."""
    least = float(rows.margins(at.V).min())
    upper = float(np.linalg.norm(at.V, "nuc")) / least if least > 0 else math.inf
    size = float(np.linalg.norm(rows.combine(at.multipliers), 2))
    lower = float(at.multipliers.sum()) / size if size else 0.0
    if best is None or upper < best.upper:
        W, upper = (at.V / least if least > 0 else at.V), upper
    else:
        W, upper = best.W, best.upper
    if best is None or lower > best.lower:
        return SolverResult(at.multipliers / size if size else at.multipliers, W, lower, upper)
    return replace(best, W=W, upper=upper)
