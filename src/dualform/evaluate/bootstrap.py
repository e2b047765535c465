"""Intervals by bootstrap: what a number would be, had other queries (or subsets) been drawn."""

import torch
from jaxtyping import Float
from torch import Tensor

SAMPLES = 1000
"""How often is drawn again."""


def interval_of_mean(values: Float[Tensor, " n"], seed: int = 0, samples: int = SAMPLES) -> tuple[float, float]:
    """The 95 % interval of the mean of values, without those that are NaN."""
    kept = values.detach().double()[~values.isnan()]
    if not len(kept):
        return float("nan"), float("nan")
    drawn = torch.randint(len(kept), (samples, len(kept)), generator=torch.Generator().manual_seed(seed))
    return percentiles(kept[drawn].mean(1))


def percentiles(values: Float[Tensor, " samples"]) -> tuple[float, float]:
    """The middle 95 % of values."""
    kept = values[~values.isnan()]
    if not len(kept):
        return float("nan"), float("nan")
    low, high = kept.quantile(torch.tensor([0.025, 0.975], dtype=kept.dtype)).tolist()
    return low, high
