"""Whether a target moves along a line when examples are weighted less: if it does not, no slope predicts removals."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ..notebook import Displayed, metasmoothness_html

LOW = 0.8
"""Below this, the answer warns."""


@dataclass(frozen=True)
class Metasmoothness(Displayed):
    r"""How smoothly targets depend on the weights of the examples, along a few random directions.

    A direction v takes a random share of the examples away. With the weights w = 1 of all visits, let
    :math:`\Delta_1 = \varphi(w + v/2) - \varphi(w)` and :math:`\Delta_2 = \varphi(w + v) - \varphi(w + v/2)` for each
    target. The value is how far their signs agree, the mean over the directions of

    .. math:: \sum_q |\Delta_{1q}|\, \mathrm{sign}(\Delta_{1q})\, \mathrm{sign}(\Delta_{2q}) \Big/ \sum_q |\Delta_{1q}|,

    1 where every target goes on as it began, and below 0 where each training ends somewhere else, whatever the
    weights (Engstrom et al. 2025, arXiv 2503.13751).
    """

    share: float
    """The share of the examples that were weighted by 1/2, and then left out."""
    first: Float[Tensor, "directions queries"]
    second: Float[Tensor, "directions queries"]

    @property
    def per_direction(self) -> Float[Tensor, " directions"]:
        """The value for each random subset. Where they differ much, look at more of them."""
        weights = self.first.double().abs()
        agreement = (weights * self.first.sign() * self.second.sign()).sum(1)
        return (agreement / weights.sum(1)).nan_to_num(1.0)  # nothing moves at all

    @property
    def value(self) -> float:
        return float(self.per_direction.mean())

    @property
    def is_low(self) -> bool:
        """Whether predictions of removals of this size should not be trusted."""
        return self.value < LOW

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return metasmoothness_html(self)

    def __str__(self) -> str:
        lowest, highest = self.per_direction.min(), self.per_direction.max()
        facts = (
            f"Metasmoothness {self.value:.2f} ({lowest:.2f} to {highest:.2f} for {len(self.first)} random subsets of "
            f"{self.share:.0%} of the examples)"
        )
        if self.is_low:
            return (
                f"{facts}: this training is not smooth there, so influence through training predicts such removals "
                "only roughly. Smaller steps, larger batches, a larger eps of Adam or smooth activations (GELU) help; "
                "or trust only what was retrained."
            )
        return f"{facts}: the targets move along a line, as influence through training supposes."
