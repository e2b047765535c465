"""Do scores find wrong labels? The area under the ROC curve."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dualform.errors import QueryError, require

from .bootstrap import percentiles
from .ranks import ranks


@dataclass(frozen=True)
class Detection:
    """The chance that a wrongly labelled example is more suspicious than a rightly labelled one (ROC AUC).

    ``low`` and ``high``: a 95 % interval by bootstrap over the examples, of either kind as many as there are.
    """

    auc: float
    low: float
    high: float
    wrong: int
    examples: int

    def __float__(self) -> float:
        return self.auc

    def __str__(self) -> str:
        return (
            f"A wrongly labelled example is more suspicious than a rightly labelled one {self.auc:.1%} of the time "
            f"(95 % interval {self.low:.1%} to {self.high:.1%}, {self.wrong} of {self.examples} labels are wrong)."
        )

    def to_pandas(self) -> Any:
        pandas = require("pandas", "pandas")
        return pandas.DataFrame([vars(self)])


def mislabelled(
    suspicion: Float[Tensor, " examples"], wrong: Bool[Tensor, " examples"], seed: int = 0, samples: int = 500
) -> Detection:
    """How well suspicion finds wrong labels; ties count a half.

    Suspicion is the larger the more an example looks wrong: its loss, or how much it speaks *against* its own label,
    minus the influence of each example on the margin of its own given label.
    """
    suspicion, wrong = torch.as_tensor(suspicion).detach().double(), torch.as_tensor(wrong)
    if suspicion.shape != wrong.shape or suspicion.ndim != 1:
        raise QueryError(
            f"suspicion has shape {tuple(suspicion.shape)} and wrong {tuple(wrong.shape)}: give one number and one "
            "truth value an example."
        )
    count = int(wrong.sum())
    if not 0 < count < len(wrong):
        raise QueryError(f"{count} of {len(wrong)} labels are wrong: an AUC needs wrong ones and right ones.")
    bad, good = suspicion[wrong], suspicion[~wrong]
    generator = torch.Generator().manual_seed(seed)
    drawn = [part[torch.randint(len(part), (samples, len(part)), generator=generator)] for part in (bad, good)]
    low, high = percentiles(area(*drawn))
    return Detection(float(area(bad, good)), low, high, count, len(wrong))


def area(bad: Float[Tensor, "*samples m"], good: Float[Tensor, "*samples n"]) -> Float[Tensor, "*samples"]:
    """The share of pairs in which the bad one is larger; ties count a half."""
    count = bad.shape[-1]
    above = ranks(torch.cat([bad, good], dim=-1))[..., :count].sum(-1) - count * (count - 1) / 2
    return above / (count * good.shape[-1])
