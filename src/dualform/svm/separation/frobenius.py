r"""Frobenius norm: an ordinary hard-margin SVM through the origin, solved by block dual coordinate descent.

.. math:: \max_{\lambda\ge0}\ b^\top\lambda - \tfrac12\|M(\lambda)\|_F^2,\qquad W = M(\lambda) =
    \sum_{it}\lambda_{it}(x_{i,\alpha_i} - x_{it})z_i^\top

The rows of one query share W z, so a sweep costs d² a query and d a row. Every few sweeps the rows that hold nothing up
are left out (shrinking), those that hold something are solved for together (``faces``), and all margins are looked at:

.. math:: \frac{b^\top\lambda}{\|M(\lambda)\|_F} \le \min\|W\|_F \le \frac{\|W\|_F}{\mu(W)},\qquad
    \mu(W) = \min_r \delta_r^\top W z

which ends the search. Soft margin: :math:`\tfrac12\|W\|^2 + C\sum\xi` bounds the multipliers by C, and
:math:`C\sum\xi^2` adds 1/(2C) to the diagonal. Reference: Tarzanagh et al. (2023), arXiv 2308.16898.
"""

import math
import time
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from .constraint_rows import Array, ConstraintRows
from .margin_faces import LARGEST, among_growing, climb, cost, empty_row, proved

SWEEPS = 2
"""Times that the rows of a query are gone through before the next query has its turn."""

FREE = 1e7
"""Operations on a face that no sweep has to pay for in each round: where a problem is small, faces end it soonest."""


@dataclass(frozen=True)
class SolverSettings:
    """How to solve. ``C`` and ``squared`` are the soft margin's, ``working`` how many rows of a query to begin with."""

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
        """Whether every constraint is to be met."""
        return math.isinf(self.C)

    @property
    def high(self) -> float:
        """The largest multiplier."""
        return math.inf if self.squared else self.C

    @property
    def ridge(self) -> float:
        """What the squared penalty adds to the diagonal."""
        return 1 / (2 * self.C) if self.squared else 0.0


@dataclass(frozen=True)
class SolverResult:
    """Multipliers, W = M(λ) of them, bounds of the optimum, and the multipliers that prove that there is none.

    ``residual`` is by how much equalities are missed. The multipliers of a hard margin are scaled so that the smallest
    margin is 1.
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
        """How far the upper bound may be above the optimum, relative to it: 1 where nothing is known."""
        return max(0.0, 1 - self.lower / self.upper) if 0 < self.upper < math.inf else float(self.upper != 0)

    @property
    def error(self) -> float:
        """The gap, or by how much equalities are missed."""
        return max(self.gap, self.residual)


def solve(
    rows: ConstraintRows,
    settings: SolverSettings,
    begin: Float[Array, " r"] | None = None,
    first: Float[Array, " r"] | None = None,
) -> SolverResult:
    """Solve from multipliers to ``begin`` with; ``first`` orders the rows of a working set, the smallest enter it."""
    clock, live, shuffled = time.perf_counter(), rows.curvature > 0, np.random.default_rng(0)
    multipliers = np.zeros(len(rows)) if begin is None else np.where(rows.equal, begin, begin.clip(0, settings.high))
    if not settings.hard:  # a row of zeros is missed whatever W is, so its multiplier is at its end
        multipliers[~live] = min(settings.high, 1 / settings.ridge if settings.ridge else math.inf)
    proof = empty_row(rows) if settings.hard else None
    active = live & (_first(rows, first, settings.working) | rows.equal | (multipliers != 0))
    best, done, credit, doubt = _measured(rows, multipliers, settings)[0], 0, 0.0, 0
    while proof is None and not _ended(rows, best, settings, done, time.perf_counter() - clock):
        before, more = multipliers, 5 if done < 20 else 10
        multipliers, proof, credit = _round(rows, active, multipliers, settings, more, credit, shuffled)
        done += more
        found, margins = _measured(rows, multipliers, settings)
        if proof is None and settings.hard and math.isinf(found.upper) and done >= doubt:
            proof, doubt = among_growing(rows, multipliers - before), 2 * done
        best = found if found.error <= best.error else best
        active = live & _next(rows, active, multipliers, margins, settings)
    if proof is not None:
        best = SolverResult(proof, rows.combine(proof), math.inf, math.inf, proof=proof)
    return replace(best, epochs=done, seconds=time.perf_counter() - clock)


def _round(
    rows: ConstraintRows,
    active: Bool[Array, " r"],
    multipliers: Float[Array, " r"],
    settings: SolverSettings,
    sweeps: int,
    credit: float,
    shuffled: np.random.Generator,
) -> tuple[Float[Array, " r"], Float[Array, " r"] | None, float]:
    """Some sweeps over the active rows, then steps on the face that they have found, for as much work as the sweeps."""
    from .coordinate_descent import descent_sweep

    out, some = multipliers.copy(), np.flatnonzero(active)
    part, mine = rows.pick(some), multipliers[some]
    W, high = part.combine(mine), np.where(part.equal, np.inf, settings.high)
    for _ in range(sweeps):
        descent_sweep(
            part.points, part.queries, part.sizes, part.plus, part.minus, part.start, shuffled.permutation(part.busy),
            part.curvature, part.target, part.low, high, settings.ridge, mine, W, SWEEPS,
        )  # fmt: skip
    out[some] = mine
    credit += sweeps * (2 * len(part.busy) * W.size + 4 * SWEEPS * len(part) * len(W)) + FREE
    few = np.arange(len(part)) if len(part) <= LARGEST else np.flatnonzero(mine)
    steps = min(100, int(credit / cost(len(few)))) if settings.faces and 0 < len(few) <= LARGEST else 0
    if not steps:
        return out, None, credit
    out[some[few]], proof = climb(part.pick(few), mine[few], settings.high, settings.ridge, steps=steps)
    return out, None if proof is None else proved(rows, some[few], proof), 0.0


def _measured(
    rows: ConstraintRows, multipliers: Float[Array, " r"], settings: SolverSettings
) -> tuple[SolverResult, Float[Array, " r"]]:
    """The bounds that multipliers give, and all margins."""
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


def _ended(rows: ConstraintRows, best: SolverResult, settings: SolverSettings, done: int, seconds: float) -> bool:
    apart = settings.tolerance * float(np.abs(rows.target).max(initial=0))
    solved = best.gap <= settings.tolerance and best.residual <= apart
    return solved or done >= settings.epochs or seconds >= settings.seconds


def _next(
    rows: ConstraintRows, active: Bool[Array, " r"], multipliers: Float[Array, " r"], margins: Float[Array, " r"],
    settings: SolverSettings,
) -> Bool[Array, " r"]:  # fmt: skip
    """The rows of the next round: with shrinking those that hold something up, or may soon."""
    near = rows.target + 0.1 * float((rows.target - margins).max(initial=0.1))
    wanted = margins < (near if settings.shrink else np.inf)
    if settings.working:
        wanted &= active
        wanted |= (margins < rows.target) & _first(rows, margins, settings.working)
    return wanted | rows.equal | (multipliers != 0)


def _first(rows: ConstraintRows, by: Float[Array, " r"] | None, count: int | None) -> Bool[Array, " r"]:
    """The rows of each query that are smallest in something, up to a number; all of them without one."""
    if count is None:
        return np.ones(len(rows), dtype=bool)
    order = np.lexsort((np.zeros(len(rows)) if by is None else by, rows.query))
    mask = np.zeros(len(rows), dtype=bool)
    mask[order[np.arange(len(rows)) - rows.start[rows.query] < count]] = True
    return mask
