"""How concentrated attention is: the theory of separating matrices assumes that all weight is on one token."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LEVELS = (0.9, 0.99, 0.999)


@dataclass(frozen=True)
class Saturation:
    """Means over queries: shares from 0 to 1, entropy in nats, tokens as counts.

    ``above`` are the shares of queries with a weight above each of ``LEVELS``, ``entropy_share`` is the entropy
    relative to that of equal weights. Thresholds decide whether a token is ``selected`` or masked; ``ambiguous`` is the
    share of queries with a token that is neither. ``holding`` is the number of tokens that hold 95 % of the weight.
    """

    above: tuple[float, float, float]
    largest: float
    entropy: float
    entropy_share: float
    selected: float
    ambiguous: float
    holding: float

    @property
    def hard(self) -> bool:
        """Whether most queries put 0.99 of their weight on one token; otherwise the theory says little."""
        return self.above[1] > 0.5


def saturation(
    weights: Float[Tensor, "c m"], hidden: Bool[Tensor, "c m"], selected: float, masked: float
) -> Saturation:
    """Measure attention weights, one row for each query; each row sums to 1."""
    largest = weights.amax(1)
    entropy = torch.special.entr(weights).sum(1)
    most = (~hidden).sum(1).clamp(min=2).log()
    cumulative = weights.sort(1, descending=True).values.cumsum(1)
    unclear = (weights < selected) & (weights > masked) & ~hidden
    return Saturation(
        (_share(largest > LEVELS[0]), _share(largest > LEVELS[1]), _share(largest > LEVELS[2])),
        float(largest.mean()), float(entropy.mean()), float((entropy / most).mean()),
        float((weights >= selected).sum(1).double().mean()), _share(unclear.any(1)),
        float(((cumulative < 0.95).sum(1) + 1).double().mean()),
    )  # fmt: skip


def _share(mask: Bool[Tensor, " c"]) -> float:
    return float(mask.double().mean())
