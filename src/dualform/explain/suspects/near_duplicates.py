"""The nearest other example of each, by the angle between what the first layer saw of them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHEAP = 1 << 37
"""How many multiplications the search may take: a few seconds on one core."""

BLOCK = 1024


def nearest_examples(
    features: Float[Tensor, "n d"],
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]] | None:
    """The row of the nearest other example and its distance, 1 − cosine of the centred features.

    None where there are so many examples that this would take long.
    """
    n, d = features.shape
    if n * n * d > CHEAP or n < 2:
        return None
    unit = torch.nn.functional.normalize(features - features.mean(0), dim=1)
    rows, distances = [], []
    for begin in range(0, n, BLOCK):
        cosines = unit[begin : begin + BLOCK] @ unit.mT
        own = torch.arange(len(cosines))
        cosines[own, begin + own] = -2.0
        best = cosines.max(1)
        rows.append(best.indices)
        distances.append((1 - best.values).clamp(min=0))
    return torch.cat(rows), torch.cat(distances)
