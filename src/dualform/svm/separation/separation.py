r"""The W that separates selected tokens from the others by the largest margin, with bounds of the optimum.

``fit`` solves Att-SVM (``problem``) in the norm that training W (Frobenius), or training keys and queries separately
(nuclear), leads to. The answer is a ``Separation`` with a lower and an upper bound of the optimum. Where no W separates
the tokens it holds a certificate instead of a matrix. Reference: Tarzanagh et al. (2023), arXiv 2308.16898.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dualform.errors import QueryError, SizeError

from . import frobenius, nuclear
from .constraint_rows import ConstraintRows
from .frobenius import SolverResult, SolverSettings
from .problem import Problem, Selected

Norm = Literal["frobenius", "nuclear"]
MarginLoss = Literal["hinge", "squared"]
SolutionT = TypeVar("SolutionT")


@dataclass(frozen=True)
class InfeasibilityCertificate:
    r"""A proof that no W separates: multipliers λ, scaled to bᵀλ = 1, whose rows cancel, :math:`M(\lambda) = 0`.

    Every W would have :math:`\langle M(\lambda), W\rangle \ge 1`, so none with a norm below ``bound`` = 1/``left``
    does; ``left`` is the norm that rounding leaves of M(λ), ``relative`` the same beside the terms of the sum.
    """

    multipliers: Float[Tensor, "n T"]
    left: float
    relative: float

    @property
    def bound(self) -> float:
        """No W with a smaller Frobenius norm separates the tokens."""
        return 1 / self.left if self.left else math.inf

    def __str__(self) -> str:
        queries, rows = int((self.multipliers != 0).any(1).sum()), int((self.multipliers != 0).sum())
        return f"{rows} constraints of {queries} queries cancel to {self.relative:.0e} of their size"


@dataclass(frozen=True)
class Separation:
    r"""The result of ``fit``. ``feasible`` is None where neither a W nor a certificate was found in time.

    ``lower`` ≤ optimum ≤ ``upper``, for the norm of W or, with a soft margin, for norm²/2 plus the penalty. ``gap`` is
    1 − lower/upper. ``multipliers`` are zero off the support; with the Frobenius norm they make up W,
    :math:`W = \sum_{it}\lambda_{it}(x_{i,\alpha_i} - x_{it})z_i^\top`, with the nuclear norm the largest singular value
    of :math:`M(\lambda)` is 1. ``residual`` is the largest difference between the scores of tokens selected together.
    """

    problem: Problem
    norm: Norm
    feasible: bool | None
    multipliers: Float[Tensor, "n T"]
    lower: float
    upper: float
    gap: float
    residual: float
    tolerance: float
    epochs: int
    seconds: float
    certificate: InfeasibilityCertificate | None = None
    solution: Float[Tensor, "x z"] | None = None

    @property
    def W(self) -> Float[Tensor, "x z"]:
        """The separating matrix: the logit of token x for query z is xᵀWz."""
        return self._if_feasible(self.solution)

    @cached_property
    def margins(self) -> Float[Tensor, "n T"]:
        """The margin of the selected token over each other token; infinite at selected and hidden tokens."""
        return self.problem.margins(self.W)

    @property
    def support(self) -> Bool[Tensor, "n T"]:
        """The tokens with a multiplier, which support the margin. W is the same without all others."""
        return (self._if_feasible(self.multipliers) != 0) & ~self.problem.selected

    @property
    def converged(self) -> bool:
        """Whether the problem is solved to the tolerance or proved to be infeasible."""
        return self.feasible is False or (self.feasible is True and self.gap <= self.tolerance)

    def rank(self, cut: float = 1e-3) -> int:
        """The number of singular values of W above ``cut`` times the largest."""
        singular = torch.linalg.svdvals(self.W)
        return int((singular > cut * singular[0]).sum())

    def _if_feasible(self, solution: SolutionT | None) -> SolutionT:
        if solution is None or self.feasible is False:
            raise QueryError(
                f"no W separates these selected tokens: {self.certificate}. Look at .feasible first; a soft margin "
                "(C=…) has a solution for every selection."
            )
        return solution

    def __str__(self) -> str:
        queries, rows = len(self.problem.queries), len(self.problem.rows)
        size, spent = f"{queries} queries, {rows:,} constraints: ", f"{self.epochs} epochs, {self.seconds:.2g} s"
        if self.feasible is False:
            return f"{size}no W separates them ({self.certificate}; {spent})"
        if self.feasible is None:
            apart = f", and tokens selected together are {self.residual:.0e} apart" if self.residual else ""
            return f"{size}not decided: no W below norm {self.lower:.4g} separates them{apart} ({spent})"
        state = "" if self.converged else "NOT solved, "
        summary = f"{self.norm} {self.upper:.6g}, {state}gap {self.gap:.0e}"
        return f"{size}{summary}, {int(self.support.sum())} support tokens ({spent})"


def fit(
    tokens: Float[Tensor, "s T x"], queries: Float[Tensor, "n z"], selected: Selected, norm: Norm = "frobenius", *,
    sequence: Int[Tensor, " n"] | None = None, hidden: Bool[Tensor, "n T"] | None = None, C: float = math.inf,
    loss: MarginLoss = "hinge", tolerance: float | None = None, epochs: int | None = None, seconds: float = math.inf,
    start: Separation | None = None, shrink: bool = True, working: int | None = None,
    logits: Float[Tensor, "n T"] | None = None, reduce: bool = True,
) -> Separation:  # fmt: skip
    """Separate the selected token (or tokens, given as a mask) of each query from the others that it sees.

    ``sequence`` is the sequence that each query attends to (by default query i to sequence i); ``hidden`` is True at
    padding and at other tokens that a query does not see. A finite ``C`` is the price of a margin below 1, and ``loss``
    is the penalty. ``tolerance`` is the gap to reach (1e-6; nuclear: 1e-3), ``epochs`` and ``seconds`` limit the
    search. ``start`` provides the multipliers of another separation to start from. ``working`` starts with this many
    tokens per query, those with the largest ``logits``, and adds the ones that the solution violates. ``shrink`` and
    ``reduce`` only change the time.
    """
    if norm not in ("frobenius", "nuclear") or loss not in ("hinge", "squared"):
        raise QueryError(f"norm={norm!r} is 'frobenius' or 'nuclear', and loss={loss!r} 'hinge' or 'squared'.")
    tolerance = (1e-6 if norm == "frobenius" else 1e-3) if tolerance is None else tolerance
    epochs = (20_000 if norm == "frobenius" else 10_000) if epochs is None else epochs
    for name, value in (("C", C), ("tolerance", tolerance), ("epochs", epochs), ("seconds", seconds)):
        if not value > 0:
            raise QueryError(f"{name}={value} must be larger than 0.")
    if working is not None and working < 1:
        raise QueryError(f"working={working} tokens per query to start with: give 1 or more, or None for all.")
    soft = math.isfinite(C)
    problem = Problem.of(tokens, queries, selected, sequence=sequence, hidden=hidden, reduce=reduce, once=not soft)
    if (norm == "nuclear" or soft) and bool(problem.rows.equal.any()):
        raise QueryError("several selected tokens per query need the Frobenius norm with a hard margin.")
    if logits is not None and logits.shape != problem.selected.shape:
        raise SizeError(f"logits= are (queries, tokens) = {tuple(problem.selected.shape)}: not {tuple(logits.shape)}.")
    if norm == "nuclear" and soft:
        raise QueryError(f"C={C}: a soft margin needs the Frobenius norm.")
    settings = SolverSettings(C, loss == "squared", tolerance, epochs, seconds, shrink, working=working)
    begin = None if start is None else _multipliers_from(problem, start)
    first = None if logits is None else -logits.detach().cpu().double().flatten().numpy()[problem.rows.place]
    solve = frobenius.solve if norm == "frobenius" else nuclear.solve
    return separation(problem, norm, settings, problem.rows, solve(problem.rows, settings, begin, first))


def separation(
    problem: Problem, norm: Norm, settings: SolverSettings, rows: ConstraintRows, result: SolverResult
) -> Separation:
    """A solver's result in terms of tokens and queries. It is undecided (None) if equalities are violated."""
    apart = result.residual > settings.tolerance * float(np.abs(rows.target).max(initial=0))
    table, proved = problem.table(rows, result.multipliers), result.proof is not None
    left, terms = float(np.linalg.norm(result.W)), float(np.abs(result.multipliers) @ np.sqrt(rows.curvature))
    return Separation(
        problem, norm, False if proved else None if math.isinf(result.upper) or apart else True, table,
        math.inf if proved else result.lower, result.upper, math.nan if proved else result.gap, result.residual,
        settings.tolerance, result.epochs, result.seconds,
        InfeasibilityCertificate(table, left, left / terms if terms else 0.0) if proved else None,
        None if proved else problem.full_matrix(result.W),
    )  # fmt: skip


def _multipliers_from(problem: Problem, start: Separation) -> Float[np.ndarray, " r"]:
    """The multipliers of another separation, for the rows of this problem."""
    if start.multipliers.shape != problem.selected.shape:
        raise QueryError(
            f"start= is a separation of {tuple(start.multipliers.shape)} queries and tokens, and these are "
            f"{tuple(problem.selected.shape)}."
        )
    if start.feasible is False:
        return np.zeros(len(problem.rows))
    return start.multipliers.flatten().numpy()[problem.rows.place]
