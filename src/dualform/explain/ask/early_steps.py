"""How much of an answer the first few steps of training make up: under Adam without a warm-up it is a lot.

Adam divides each entry of the gradient by the root of its running square. In the first steps that square holds little
but the gradient itself, so that every step is as large as the learning rate, however little the examples had to say.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Bool

from dualform.engine import Scores
from dualform.store import Block, Store
from dualform.types import Score

from ..hits import SlotHits
from ..query import Question, is_preconditioned

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


def remark_of(store: Store, layers: Sequence[str], share: float, after: int) -> str:
    """A sentence, where the first steps under a rule such as Adam make up a large share of what is recalled."""
    if not _is_worth_a_word(store, share, after):
        return ""
    rule = next((name for layer in layers if (name := _rule_of(store, layer))), "Adam")
    return (
        f"{share:.0%} of what is recalled here (Σ|contribution|) was put in by the first {FIRST_STEPS} of "
        f"{store.steps:,} steps, in which {rule} makes every gradient large. after={FIRST_STEPS} leaves them out."
    )


def remark_of_slots(question: Question, hits: SlotHits, after: int) -> str:
    """The same of single slots: how many of the best ones are from the first steps."""
    store = question.store
    share = float((hits.steps <= FIRST_STEPS).double().mean()) if hits.steps.numel() else 0.0
    if question.score != "contribution" or not is_preconditioned(store, question.info):
        return ""
    if not _is_worth_a_word(store, share, after):
        return ""
    return (
        f"{share:.0%} of these slots are from the first {FIRST_STEPS} of {store.steps:,} steps, in which "
        f"{_rule_of(store, question.info.name)} makes every gradient large. after={FIRST_STEPS} leaves them out; "
        'per="example" adds up all visits of an example.'
    )


def _is_worth_a_word(store: Store, share: float, after: int) -> bool:
    return store.steps >= SHORTEST and not after and share >= max(LARGE, 3 * FIRST_STEPS / store.steps)


def _rule_of(store: Store, layer: str) -> str:
    """The name of the rule with a preconditioner that explains a layer; nothing if there is none."""
    info, _ = store.layer(layer)
    rules = [store.rule(name) for name in info.parameters if store.is_preconditioned(name)]
    return next((rule.name for rule in rules if rule is not None), "")
