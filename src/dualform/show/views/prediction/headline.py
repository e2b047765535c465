"""The answer in one sentence: what the network says, whether it is right, and because of how many examples."""

from collections.abc import Sequence
from dataclasses import dataclass

from dualform.explain import Groups

from ..explorer import ClassScore, Explorer
from ..numbers import number, percent
from .question import PredictionQuestion

HALF, FEW = 0.5, 5
"""The share of what speaks for an answer that is counted, and up to how many examples are "these" alone."""


@dataclass(frozen=True)
class Headline:
    """Parts of a sentence: "It says" **answer** (chance), verdict **truth**, because."""

    answer: str
    chance: str
    verdict: str
    truth: str
    because: str
    is_few: bool
    """Whether a handful of examples is the reason."""


def headline_of(
    explorer: Explorer, says: Sequence[ClassScore], truth: int | None, question: PredictionQuestion,
    of_examples: Groups | None,
) -> Headline:  # fmt: skip
    """The headline of a prediction; ``of_examples`` is what each training example adds."""
    first = says[0]
    has_classes = first.probability is not None
    answer = first.name if has_classes else number(first.logit)
    chance = "" if first.probability is None else percent(first.probability)
    is_right = truth is None or first.number == truth
    verdict = "" if truth is None or not has_classes else "which is right" if is_right else "but it is"
    right = "" if is_right or truth is None or not has_classes else explorer.class_name(truth)
    count, everyone = examples_of_half(of_examples) if of_examples is not None else (0, 0)
    because = _because(count, everyone) if question.order == "largest" else ""
    return Headline(answer, chance, verdict, right, because, 0 < count <= FEW)


def examples_of_half(groups: Groups) -> tuple[int, int]:
    """How many training examples give half of all that speaks for the explained number, and how many there are."""
    values = groups.values[0] + (groups.bias[0] if groups.bias is not None else 0.0)
    known = [i for i, name in enumerate(groups.names) if name is not None]
    speaking = values[known].clamp(min=0).sort(descending=True).values
    total = float(speaking.sum())
    if not total > 0:
        return 0, len(known)
    return int((speaking.cumsum(0) < HALF * total).sum()) + 1, len(known)


def _because(count: int, everyone: int) -> str:
    if not count:
        return ""
    if count == 1:
        return "mostly because of this training example"
    if count <= FEW:
        return f"mostly because of these {count} training examples"
    return f"half of what speaks for it comes from {count:,} of {everyone:,} training examples, these first"
