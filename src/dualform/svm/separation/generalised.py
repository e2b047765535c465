r"""Several selected tokens per query: where W converges in training if the loss favours a mixture of tokens.

.. math:: W \approx W_{fin} + R\,W_{dir},\qquad R \to \infty

- :math:`W_{dir}`: the smallest W that scores all selected tokens O_i of a query alike and 1 above the masked ones;
- :math:`W_{fin}`: the smallest W with :math:`(x_{it} - x_{iu})^\top W z_i = \log(s_{it}/s_{iu})` for t, u in O_i, which
  fixes their weights in the mixture.

With one selected token a query the first is Att-SVM and the second is zero. Reference: Tarzanagh et al. (2023), arXiv
2308.16898, whose code selects tokens of weight 1e-3 or more and masks those of 1e-6 or less.
"""

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dualform.errors import QueryError, SizeError

from . import frobenius
from .frobenius import SolverResult, SolverSettings
from .margin_faces import checked_proof
from .problem import Problem
from .separation import Separation, separation
from .span import least_norm_solution


@dataclass(frozen=True)
class TwoParts:
    """The direction and the finite part, with the tokens that they were computed for.

    ``ambiguous`` tokens have a weight between the two thresholds and enter neither problem; the paper leaves out every
    trial that has one. Each part can be infeasible, and then has a certificate.
    """

    direction: Separation
    finite: Separation
    selected: Bool[Tensor, "n T"]
    ambiguous: Bool[Tensor, "n T"]

    @property
    def feasible(self) -> bool | None:
        """Whether both parts have a solution."""
        both = (self.direction.feasible, self.finite.feasible)
        return False if False in both else None if None in both else True

    def scale(self, W: Float[Tensor, "x z"]) -> float:
        """The factor R of a trained W, by least squares."""
        along = self.direction.W
        return float(((W - self.finite.W) * along).sum() / along.square().sum()) if bool(along.any()) else 0.0

    def predicted(self, W: Float[Tensor, "x z"]) -> Float[Tensor, "x z"]:
        """The prediction W_fin + R W_dir for a trained W, of which only R is fitted."""
        return self.finite.W + self.scale(W) * self.direction.W


def fit_generalised(
    tokens: Float[Tensor, "s T x"], queries: Float[Tensor, "n z"], weights: Float[Tensor, "n T"], *,
    selected: float = 1e-3, masked: float = 1e-6, sequence: Int[Tensor, " n"] | None = None,
    hidden: Bool[Tensor, "n T"] | None = None, tolerance: float = 1e-6, epochs: int = 20_000, reduce: bool = True,
) -> TwoParts:  # fmt: skip
    """Both parts for the tokens that attention ``weights`` select; the largest weight of a query always selects."""
    if not 0 <= masked < selected <= 1 or not tolerance > 0 or epochs < 1:
        raise QueryError(
            f"masked={masked} is below selected={selected}, both between 0 and 1; tolerance={tolerance} and "
            f"epochs={epochs} are larger than 0."
        )
    if weights.ndim != 2 or len(weights) != len(queries):
        raise SizeError(f"weights are (queries, tokens): these are {tuple(weights.shape)}, and {len(queries)} queries.")
    weights = weights.detach().cpu().double()
    hidden = torch.zeros_like(weights, dtype=torch.bool) if hidden is None else hidden.detach().cpu().bool()
    weights = weights.masked_fill(hidden, 0.0)
    if not bool((weights >= 0).all() and weights.isfinite().all() and (weights.amax(1) > 0).all()):
        raise QueryError("weights are those of attention: 0 or more, with something above 0 for every query.")
    chosen = (weights >= selected) | torch.nn.functional.one_hot(weights.argmax(1), weights.shape[1]).bool()
    ambiguous = ~chosen & (weights > masked)
    problem = Problem.of(tokens, queries, chosen, sequence=sequence, hidden=hidden | ambiguous, reduce=reduce)
    settings = SolverSettings(tolerance=tolerance, epochs=epochs)
    direction = separation(problem, "frobenius", settings, problem.rows, frobenius.solve(problem.rows, settings))
    return TwoParts(direction, _finite(problem, weights, settings), chosen, ambiguous)


def _finite(problem: Problem, weights: Float[Tensor, "n T"], settings: SolverSettings) -> Separation:
    """The W of least norm that gives the selected tokens their weights; its constraints are all equations."""
    logs = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
    rows = problem.rows_with(logs.gather(1, problem.chosen.unsqueeze(1)) - logs, masked=False)
    clock = time.perf_counter()
    W, multipliers, missed = least_norm_solution(rows, rows.target)
    norm, largest = float(np.linalg.norm(W)), float(np.abs(missed).max(initial=0))
    result = SolverResult(multipliers, W, norm, norm, largest, seconds=time.perf_counter() - clock)
    if largest > settings.tolerance * float(np.abs(rows.target).max(initial=0)):
        proof = checked_proof(rows, np.arange(len(rows)), missed)
        result = (
            frobenius.solve(rows, settings)
            if proof is None
            else replace(result, multipliers=proof, W=rows.combine(proof), proof=proof)
        )
    return separation(problem, "frobenius", settings, rows, result)
