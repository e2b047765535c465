"""How many examples must go until an answer flips? Found with scores, checked by training again."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Brittleness:
    """The smallest number of tried examples whose removal flips the answer (None: none of those tried does)."""

    removed: int | None
    tried: tuple[int, ...]


def brittleness(
    scores: Float[Tensor, " examples"],
    flips: Callable[[Float[Tensor, " examples"]], bool],
    most: int | None = None,
) -> Brittleness:
    """Leave out the examples with the largest scores, and search for the smallest number that flips the answer.

    ``flips(weights)`` trains again with these weights of the examples and says whether the answer is another one. The
    search doubles the number until the answer flips, then halves the interval: it takes about 2 log₂(n) trainings, and
    assumes that more removals do not flip the answer back.
    """
    order = scores.argsort(descending=True)
    most = len(scores) if most is None else min(most, len(scores))
    tried: list[int] = []

    def flipped(count: int) -> bool:
        tried.append(count)
        weights = torch.ones(len(scores))
        weights[order[:count]] = 0.0
        return flips(weights)

    low, high = 0, 1
    while not flipped(high):
        if high == most:
            return Brittleness(None, tuple(tried))
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if flipped(middle) else (middle, high)
    return Brittleness(high, tuple(tried))
