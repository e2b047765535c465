"""How much of an answer the first few steps of training make up: under Adam without a warm-up it is a lot.

Adam divides each entry of the gradient by the root of its running square. In the first steps that square holds little
but the gradient itself, so that every step is as large as the learning rate, however little the examples had to say.
"""

from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dualform.engine import Scores
from dualform.store import Block
from dualform.types import Score

FIRST_STEPS = 5
SHORTEST = 50
"""Runs of fewer steps have no first steps to speak of."""
LARGE = 0.1
"""The share from which on an answer says so."""


class EarlyShare:
    """The share of the first steps in Σ|contribution|, of all queries together."""

    score: Score = "contribution"

    def __init__(self) -> None:
        self.first = self.all = 0.0

    def add(self, scores: Scores) -> None:
        """Add the contributions of more slots."""
        sizes = scores[self.score].abs().sum(0, dtype=torch.float64)
        early = torch.from_numpy(scores.by_slot(_is_early))
        self.first += float(sizes[early].sum())
        self.all += float(sizes.sum())

    @classmethod
    def of_all(cls, parts: Iterable["EarlyShare"]) -> float:
        """The share in several passes together."""
        found = list(parts)
        return sum(part.first for part in found) / max(sum(part.all for part in found), 1e-300)


def _is_early(block: Block) -> Bool[np.ndarray, " m"]:
    return block.steps <= FIRST_STEPS


def remark_of(share: float, steps: int, rule: str, after: int) -> str:
    """A sentence, where the first steps under a rule such as Adam make up a large share of what is recalled."""
    if not _is_worth_a_word(share, steps, after):
        return ""
    return (
        f"{share:.0%} of what is recalled here (Σ|contribution|) was put in by the first {FIRST_STEPS} of {steps:,} "
        f"steps, in which {rule} makes every gradient large. after={FIRST_STEPS} leaves them out."
    )


def remark_of_slots(taken: Int[Tensor, "n k"], steps: int, rule: str, after: int) -> str:
    """The same of single slots, which were ``taken`` in these steps."""
    share = float((taken <= FIRST_STEPS).double().mean()) if taken.numel() else 0.0
    if not _is_worth_a_word(share, steps, after):
        return ""
    return (
        f"{share:.0%} of these slots are from the first {FIRST_STEPS} of {steps:,} steps, in which {rule} makes every "
        f'gradient large. after={FIRST_STEPS} leaves them out; per="example" adds up all visits of an example.'
    )


def _is_worth_a_word(share: float, steps: int, after: int) -> bool:
    return steps >= SHORTEST and not after and share >= max(LARGE, 3 * FIRST_STEPS / steps)
