r"""Nuclear norm, which training keys and queries apart comes to: ADMM on two easy steps (arXiv 2308.16898).

.. math:: W = \Pi(V - Y),\qquad V = S_\tau(W + Y),\qquad Y \leftarrow Y + W - V

:math:`\Pi` projects onto the constraints by the same coordinate descent, from a centre that is not zero and with the
multipliers of the last time; :math:`S_\tau` lowers all singular values by :math:`\tau` and cuts off at zero, so V is
exactly of low rank. Both sides of the optimum are known at any time:

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
"""The first τ, as a part of the largest singular value of the solution of the Frobenius norm."""

RELAXED = 1.6
"""How far beyond W the step to V begins."""

EVERY = 10
"""Steps between two looks at the bounds, the penalty and the rows that take part."""


def solve(
    rows: ConstraintRows,
    settings: SolverSettings,
    begin: Float[Array, " r"] | None = None,
    first: Float[Array, " r"] | None = None,
) -> SolverResult:
    """Solve from the solution of the Frobenius norm, which also tells whether there is one."""
    clock = time.perf_counter()
    seed = frobenius.solve(rows, replace(settings, tolerance=1e-2, epochs=20_000), begin, first)
    if math.isinf(seed.upper):
        return seed
    tau = BEGIN * float(np.linalg.norm(seed.W, 2))
    at = _Point(seed.W, BEGIN * seed.W, BEGIN * seed.multipliers)
    some, shuffled, done = np.arange(len(rows)), np.random.default_rng(0), 0
    best = _better(rows, None, at)
    while best.gap > settings.tolerance and done < settings.epochs and time.perf_counter() - clock < settings.seconds:
        for _ in range(EVERY - 1):
            at = _step(rows, some, at, tau, shuffled)[1]
        old, (W, at) = at.V, _step(rows, some, at, tau, shuffled)
        done += EVERY
        best = _better(rows, best, at)
        apart, moved = (
            float(np.linalg.norm(x)) / float(np.linalg.norm(y)) for x, y in ((W - at.V, W), (at.V - old, at.Y))
        )
        change = 1.0 if moved / 5 < apart < 5 * moved else 1.5 if moved > apart else 1 / 1.5
        tau, at = tau * change, _Point(at.V, at.Y * change, at.multipliers * change)
        some = np.flatnonzero((at.multipliers > 0) | (rows.margins(W) < (1.1 if settings.shrink else np.inf)))
    return replace(best, epochs=done, seconds=time.perf_counter() - clock)


class _Point(NamedTuple):
    V: Float[Array, "x z"]
    Y: Float[Array, "x z"]
    multipliers: Float[Array, " r"]


def _step(
    rows: ConstraintRows, some: Int[Array, " s"], at: _Point, tau: float, shuffled: np.random.Generator
) -> tuple[Float[Array, "x z"], _Point]:
    """One W, V and Y; the projection is as far as one sweep from where it last was brings it."""
    from .coordinate_descent import descent_sweep

    part, mine = rows.pick(some), at.multipliers[some]
    W = at.V - at.Y + part.combine(mine)
    descent_sweep(
        part.points, part.queries, part.sizes, part.plus, part.minus, part.start, shuffled.permutation(part.busy),
        part.curvature, part.target, part.low, np.full(len(part), np.inf), 0.0, mine, W, SWEEPS,
    )  # fmt: skip
    ahead = RELAXED * W + (1 - RELAXED) * at.V + at.Y
    left, singular, right = np.linalg.svd(ahead, full_matrices=False)
    V = (left * (singular - tau).clip(0)) @ right
    multipliers = np.zeros(len(rows))
    multipliers[some] = mine
    return W, _Point(V, ahead - V, multipliers)


def _better(rows: ConstraintRows, best: SolverResult | None, at: _Point) -> SolverResult:
    """The best bounds so far: of V from above, of the multipliers from below."""
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
