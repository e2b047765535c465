r"""Frobenius norm: an ordinary hard-margin SVM through the origin, solved by block dual coordinate descent.

.. math:: \max_{\lambda\ge0}\ b^\top\lambda - \tfrac12\|M(\lambda)\|_F^2,\qquad W = M(\lambda) =
    \sum_{it}\lambda_{it}(x_{i,\alpha_i} - x_{it})z_i^\top

The rows of one query share W z, so a sweep costs d² per query and d per row. Every few sweeps the rows that are far
from active are left out (shrinking), the active ones are solved for together (``faces``), and all margins are computed:

.. math:: \frac{b^\top\lambda}{\|M(\lambda)\|_F} \le \min\|W\|_F \le \frac{\|W\|_F}{\mu(W)},\qquad
    \mu(W) = \min_r \delta_r^\top W z

These bounds end the search. Soft margin: :math:`\tfrac12\|W\|^2 + C\sum\xi` bounds the multipliers by C, and
:math:`C\sum\xi^2` adds 1/(2C) to the diagonal. Reference: Tarzanagh et al. (2023), arXiv 2308.16898.
"""

import math
import time
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from .constraint_rows import Array, ConstraintRows
from .margin_faces import LARGEST, checked_proof, newton_on_face, proof_among_growing, proof_by_empty_row, step_cost

SWEEPS = 2
"""How often descent passes over the rows of a query before it goes to the next query."""

FREE_WORK = 1e7
"""Operations that a round may always spend on a face: small problems are solved fastest that way."""


@dataclass(frozen=True)
class SolverSettings:
    """How to solve. ``C`` and ``squared`` are the soft margin's; ``working`` rows of each query form the first set."""

    C: float = math.inf
    squared: bool = False
    tolerance: float = 1e-6
    epochs: int = 20_000
    seconds: float = math.inf
    shrink: bool = True
    faces: bool = True
    working: int | None = None

    @property
    def hard(self) -> bool:
        """Whether every constraint must be met."""
        return math.isinf(self.C)

    @property
    def high(self) -> float:
        """The upper bound of the multipliers."""
        return math.inf if self.squared else self.C

    @property
    def ridge(self) -> float:
        """What the squared penalty adds to the diagonal."""
        return 1 / (2 * self.C) if self.squared else 0.0


@dataclass(frozen=True)
class SolverResult:
    """Multipliers, their W = M(λ), and bounds of the optimum; ``proof`` has the multipliers that prove infeasibility.

    ``residual`` is the largest violation of an equality. The multipliers of a hard margin are scaled so that the
    smallest margin is 1.
    """

    multipliers: Float[Array, " r"]
    W: Float[Array, "x z"]
    lower: float
    upper: float
    residual: float = 0.0
    proof: Float[Array, " r"] | None = None
    epochs: int = 0
    seconds: float = 0.0

    @property
    def gap(self) -> float:
        """1 − lower/upper: how far the upper bound may exceed the optimum; 1 where there is no upper bound."""
        return max(0.0, 1 - self.lower / self.upper) if 0 < self.upper < math.inf else float(self.upper != 0)

    @property
    def error(self) -> float:
        """The gap or, if larger, the residual of the equalities."""
        return max(self.gap, self.residual)


def solve(
    rows: ConstraintRows,
    settings: SolverSettings,
    begin: Float[Array, " r"] | None = None,
    first: Float[Array, " r"] | None = None,
) -> SolverResult:
    """Solve, from the multipliers ``begin`` if given. The rows smallest in ``first`` enter the working set."""
    clock, live, shuffled = time.perf_counter(), rows.curvature > 0, np.random.default_rng(0)
    multipliers = np.zeros(len(rows)) if begin is None else np.where(rows.equal, begin, begin.clip(0, settings.high))
    if not settings.hard:  # a row of zeros is violated by every W, so its multiplier is at its upper bound
        multipliers[~live] = min(settings.high, 1 / settings.ridge if settings.ridge else math.inf)
    proof = proof_by_empty_row(rows) if settings.hard else None
    active = live & (_smallest_rows(rows, first, settings.working) | rows.equal | (multipliers != 0))
    best, done, credit, doubt = _bounds_and_margins(rows, multipliers, settings)[0], 0, 0.0, 0
    while proof is None and not _is_finished(rows, best, settings, done, time.perf_counter() - clock):
        before, more = multipliers, 5 if done < 20 else 10
        multipliers, proof, credit = _descent_round(rows, active, multipliers, settings, more, credit, shuffled)
        done += more
        measured, margins = _bounds_and_margins(rows, multipliers, settings)
        if proof is None and settings.hard and math.isinf(measured.upper) and done >= doubt:
            proof, doubt = proof_among_growing(rows, multipliers - before), 2 * done
        best = measured if measured.error <= best.error else best
        active = live & _next_active(rows, active, multipliers, margins, settings)
    if proof is not None:
        best = SolverResult(proof, rows.combine(proof), math.inf, math.inf, proof=proof)
    return replace(best, epochs=done, seconds=time.perf_counter() - clock)


def _descent_round(
    rows: ConstraintRows,
    active: Bool[Array, " r"],
    multipliers: Float[Array, " r"],
    settings: SolverSettings,
    sweeps: int,
    credit: float,
    shuffled: np.random.Generator,
) -> tuple[Float[Array, " r"], Float[Array, " r"] | None, float]:
    """Sweep over the active rows, then take steps on the face that this has found, for about as much work."""
    from .coordinate_descent import descent_sweep

    out, indices = multipliers.copy(), np.flatnonzero(active)
    part, part_multipliers = rows.pick(indices), multipliers[indices]
    W, high = part.combine(part_multipliers), np.where(part.equal, np.inf, settings.high)
    for _ in range(sweeps):
        descent_sweep(
            part.points, part.queries, part.sizes, part.plus, part.minus, part.start,
            shuffled.permutation(part.busy_queries), part.curvature, part.target, part.low,
            high, settings.ridge, part_multipliers, W, SWEEPS,
        )  # fmt: skip
    out[indices] = part_multipliers
    credit += sweeps * (2 * len(part.busy_queries) * W.size + 4 * SWEEPS * len(part) * len(W)) + FREE_WORK
    few = np.arange(len(part)) if len(part) <= LARGEST else np.flatnonzero(part_multipliers)
    steps = min(100, int(credit / step_cost(len(few)))) if settings.faces and 0 < len(few) <= LARGEST else 0
    if not steps:
        return out, None, credit
    out[indices[few]], proof = newton_on_face(
        part.pick(few), part_multipliers[few], settings.high, settings.ridge, steps=steps
    )
    return out, None if proof is None else checked_proof(rows, indices[few], proof), 0.0


def _bounds_and_margins(
    rows: ConstraintRows, multipliers: Float[Array, " r"], settings: SolverSettings
) -> tuple[SolverResult, Float[Array, " r"]]:
    """The bounds of the optimum that follow from multipliers, and the margins of all rows."""
    W = rows.combine(multipliers)
    margins, norm = rows.margins(W), float(np.linalg.norm(W))
    if not settings.hard:
        missed = (rows.target - margins).clip(0)
        penalty = settings.C * float((missed**2 if settings.squared else missed).sum())
        lost = norm**2 / 2 + settings.ridge * float(multipliers @ multipliers) / 2
        return SolverResult(multipliers, W, float(multipliers.sum()) - lost, norm**2 / 2 + penalty), margins
    least = float(margins[~rows.equal].min(initial=math.inf)) if not rows.equal.all() else 1.0
    missed = float(np.abs(margins - rows.target)[rows.equal].max(initial=0))
    lower = float(rows.target @ multipliers) / norm if norm else 0.0
    if least <= 0:
        return SolverResult(multipliers, W, lower, math.inf, missed), margins
    return SolverResult(multipliers / least, W / least, lower, norm / least, missed / least), margins


def _is_finished(rows: ConstraintRows, best: SolverResult, settings: SolverSettings, done: int, seconds: float) -> bool:
    apart = settings.tolerance * float(np.abs(rows.target).max(initial=0))
    solved = best.gap <= settings.tolerance and best.residual <= apart
    return solved or done >= settings.epochs or seconds >= settings.seconds


def _next_active(
    rows: ConstraintRows, active: Bool[Array, " r"], multipliers: Float[Array, " r"], margins: Float[Array, " r"],
    settings: SolverSettings,
) -> Bool[Array, " r"]:  # fmt: skip
    """The active rows of the next round: with shrinking, those that bind or are close to binding."""
    near = rows.target + 0.1 * float((rows.target - margins).max(initial=0.1))
    wanted = margins < (near if settings.shrink else np.inf)
    if settings.working:
        wanted &= active
        wanted |= (margins < rows.target) & _smallest_rows(rows, margins, settings.working)
    return wanted | rows.equal | (multipliers != 0)


def _smallest_rows(rows: ConstraintRows, by: Float[Array, " r"] | None, count: int | None) -> Bool[Array, " r"]:
    """Mask of the ``count`` rows of each query with the smallest values of ``by``; all rows without a count."""
    if count is None:
        return np.ones(len(rows), dtype=bool)
    order = np.lexsort((np.zeros(len(rows)) if by is None else by, rows.query))
    mask = np.zeros(len(rows), dtype=bool)
    mask[order[np.arange(len(rows)) - rows.start[rows.query] < count]] = True
    return mask
