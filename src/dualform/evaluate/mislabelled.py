"""Do scores find wrong labels? The area under the ROC curve."""

from jaxtyping import Bool, Float
from torch import Tensor

from dualform.errors import QueryError

from .ranks import ranks


def mislabelled(suspicion: Float[Tensor, " examples"], wrong: Bool[Tensor, " examples"]) -> float:
    """The chance that a wrongly labelled example is more suspicious than a rightly labelled one; ties count a half."""
    count = int(wrong.sum())
    if not 0 < count < len(wrong):
        raise QueryError(f"{count} of {len(wrong)} labels are wrong: an AUC needs wrong ones and right ones.")
    above = ranks(suspicion)[wrong].sum() - count * (count - 1) / 2
    return float(above / (count * (len(wrong) - count)))
