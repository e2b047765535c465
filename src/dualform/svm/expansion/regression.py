r"""Support vector regression with a normaliser: the problem whose solution has the form of attention.

.. math:: \min_{W, b}\ \tfrac12\|W\|^2 + C\sum_{jd}\max(0, |r_{jd}| - \varepsilon),\qquad
    r_j = y_j - W\Phi(k_j)/h(k_j) - b

.. math:: \max_\theta\ \sum_d -\tfrac12\theta_d^\top G\theta_d - \varepsilon\|\theta_d\|_1 + y_d^\top\theta_d,\qquad
    G_{ij} = \frac{\Phi(k_i)^\top\Phi(k_j)}{h(k_i)h(k_j)},\quad |\theta_{jd}| \le C,\quad \sum_j\theta_{jd} = 0

The last constraint only applies with a bias b. Values are rescaled dual variables: v_jd = θ_jd / h(k_j). Reference:
Nguyen et al. (2023), arXiv 2406.13781.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dualform.attention import KernelName
from dualform.errors import QueryError, SizeError

from .expansion import expand, log_kernel, log_normaliser

ROUNDING = torch.finfo(torch.float64).eps
LARGEST_LOG = 300.0
"""The largest log h: the optimum grows with h², and double precision ends at e^709."""


@dataclass(frozen=True)
class Regression:
    """One regression for each column of the targets. Make it with ``of_keys``, ``of_gram`` or ``planted``.

    ``gram`` is scaled to ones on its diagonal, K_ij/(s_i s_j) with s_j = √K_jj: h and s may span many orders of
    magnitude, and this scaling keeps the coordinates distinguishable. C may be infinite.
    """

    gram: Float[Tensor, "m m"]
    log_size: Float[Tensor, " m"]
    log_normaliser: Float[Tensor, " m"]
    targets: Float[Tensor, "m e"]
    epsilon: float = 0.0
    C: float = math.inf
    with_bias: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < math.inf:
            raise QueryError(f"epsilon={self.epsilon} is the half width of a tube: it must be 0 or more, and finite.")
        if not self.C > 0:
            raise QueryError(f"C={self.C} bounds the dual variables: it must be larger than 0 (math.inf: no bound).")
        if not len(self.targets):
            raise SizeError("there is nothing to fit: the keys and the targets are empty.")
        for name, tensor in (("keys", self.gram), ("normalisers", self.log_normaliser), ("targets", self.targets)):
            if not bool(tensor.isfinite().all()):
                raise QueryError(f"the {name} hold NaN or infinity (or keys are too long for double precision).")
        if (largest := float(self.log_normaliser.abs().max())) > LARGEST_LOG:
            raise QueryError(
                f"the normaliser h(k) reaches e^{largest:.0f}: keys this long are beyond double precision. Ask for "
                "support_vectors, which stay in the logarithm."
            )

    @classmethod
    def of_keys(
        cls, keys: Float[Tensor, "m d"], targets: Float[Tensor, "t e"], *, epsilon: float = 0.0, C: float = math.inf,
        with_bias: bool = False, kernel: KernelName = "exp",
    ) -> "Regression":  # fmt: skip
        """Fit the targets at the keys, with attention's own normaliser h(x) = Σ_j Φ(x)ᵀΦ(k_j)."""
        _check_row_counts("keys", len(keys), len(targets))
        keys = keys.detach().double()
        logs, normaliser = log_kernel(keys, keys, kernel), log_normaliser(keys, keys, kernel)
        size = logs.diagonal() / 2
        unit = (logs - size.unsqueeze(1) - size).exp()
        return cls(unit, size, normaliser, targets.detach().double(), epsilon, C, with_bias)

    @classmethod
    def of_gram(
        cls, gram: Float[Tensor, "m m"], targets: Float[Tensor, "t e"], *, epsilon: float = 0.0, C: float = math.inf,
        with_bias: bool = False, normaliser: Float[Tensor, " m"] | None = None,
    ) -> "Regression":  # fmt: skip
        """Fit targets to a given kernel matrix K. ``normaliser`` is h(k_j); None means 1, the usual SVR."""
        _check_row_counts("lines of the matrix", len(gram), len(targets))
        gram = gram.detach().double()
        h = torch.ones_like(gram[0]) if normaliser is None else normaliser.detach().double()
        size = gram.diagonal().sqrt()
        unit = gram / size.unsqueeze(1) / size
        if not bool((size > 0).all() and (h > 0).all()):
            raise QueryError("the diagonal of the kernel's matrix and the normaliser must be larger than 0.")
        if not torch.allclose(unit, unit.mT, atol=1e-10) or float(torch.linalg.eigvalsh(unit)[0]) < -1e-8 * len(unit):
            raise QueryError("this is not a kernel matrix: it must be symmetric and have no negative eigenvalues.")
        return cls(unit, size.log(), h.log(), targets.detach().double(), epsilon, C, with_bias)

    @classmethod
    def planted(
        cls, keys: Float[Tensor, "m d"], values: Float[Tensor, "t e"], *, epsilon: float, C: float = math.inf,
        bias: Float[Tensor, " e"] | None = None, kernel: KernelName = "exp",
    ) -> "Regression":  # fmt: skip
        r"""The regression whose solution is the given values, if C is large enough: y_jd = f_d(k_j) + ε sign(v_jd).

        With a ``bias`` (it is part of f) the values must also be balanced, :math:`\sum_j h(k_j) v_j = 0`. The problem
        keeps these targets only, not the values.
        """
        _check_row_counts("keys", len(keys), len(values))
        keys, values = keys.detach().double(), values.detach().double()
        targets = expand(keys, keys, values, kernel=kernel, bias=bias) + epsilon * values.sign()
        return cls.of_keys(keys, targets, epsilon=epsilon, C=C, with_bias=bias is not None, kernel=kernel)

    @cached_property
    def scale(self) -> Float[Tensor, "m 1"]:
        """h(k_j)/s_j: the factor from the dual variables of the scaled problem to θ."""
        return (self.log_normaliser - self.log_size).exp().unsqueeze(1)

    @cached_property
    def condition(self) -> float:
        """The condition number of K_ij/h(k_i): how much rounding errors of the targets grow in the values."""
        attention = (self.log_size.unsqueeze(1) + self.log_size - self.log_normaliser.unsqueeze(1)).exp() * self.gram
        singular = torch.linalg.svdvals(attention)
        return float(singular[0] / singular[-1]) if float(singular[-1]) > 0 else math.inf

    def fitted(self, theta: Float[Tensor, "m e"]) -> Float[Tensor, "m e"]:
        """WΦ(k_j)/h(k_j) for given dual variables, without the bias."""
        return self.gram @ (theta / self.scale) / self.scale


@dataclass(frozen=True)
class Solution:
    """Dual variables and bias, with the duality gap, ``gap`` = ``primal`` − ``dual``, which bounds their suboptimality.

    With infinite C the penalty is computed at twice the largest |θ|, which has the same optimum.
    """

    problem: Regression
    theta: Float[Tensor, "m e"]
    bias: Float[Tensor, " e"]
    primal: float
    dual: float
    gap: float
    iterations: int
    tolerance: float

    @property
    def converged(self) -> bool:
        """Whether the gap is below the tolerance, or below what rounding of the targets changes in the optimum."""
        rounding = (16 * ROUNDING * self.problem.scale * self.problem.targets).square().sum()
        return self.gap <= self.tolerance * self.primal + float(rounding)

    @property
    def values(self) -> Float[Tensor, "m e"]:
        """Values of attention: v_jd = θ_jd / h(k_j)."""
        return self.theta * (-self.problem.log_normaliser).exp().unsqueeze(1)

    @property
    def fitted(self) -> Float[Tensor, "m e"]:
        """f(k_j), with the bias."""
        return self.problem.fitted(self.theta) + self.bias

    @property
    def support(self) -> Bool[Tensor, "m e"]:
        """Where the dual variables are not zero."""
        return self.theta != 0

    @property
    def relative_gap(self) -> float:
        """The gap divided by the primal value, which is an upper bound of the optimum."""
        return self.gap / self.primal if self.gap else 0.0

    @property
    def error(self) -> float:
        r"""Bound of the distance to the optimum, :math:`\|W - W^*\| \le \sqrt{2\,\text{gap}}`.

        It holds if C is finite or every residual is within ε.
        """
        return math.sqrt(2 * self.gap)

    def __str__(self) -> str:
        m, e = self.theta.shape
        state = "solved" if self.converged else "NOT solved"
        return (
            f"regression on {m} keys, {e} columns: {state} in {self.iterations} rounds, primal {self.primal:.6g}, "
            f"dual {self.dual:.6g}, gap {self.gap:.1e}; {int(self.support.any(1).sum())} support vectors, "
            f"largest |θ| {float(self.theta.abs().max()):.3g}"
        )


def _check_row_counts(rows: str, keys: int, targets: int) -> None:
    if keys != targets:
        raise SizeError(f"there are {keys} {rows} and {targets} rows of targets: give one row for each.")
