"""The label of each example, as all other examples suggest it: ridge regression, each time without the example."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

PENALTIES = (1e-3, 1e-2, 1e-1, 0.3, 1.0, 3.0, 10.0)
"""What is added to the variances, relative to their mean."""

SHARPNESS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Factors that turn the values of a regression into logits."""

EXACT_WIDTH = 512
"""Up to this many columns the regression is solved in float64."""


def leave_one_out_labels(
    features: Float[Tensor, "n d"], labels: Int[Tensor, " n"], classes: int
) -> Float[Tensor, "n classes"]:
    r"""The probability of each class for each example, by a regression on all examples but this one.

    .. math:: \hat y_{-i} = y_i - \frac{y_i - \hat y_i}{1 - h_i}

    y is 1 for the given label and 0 for other classes, :math:`h_i` the leverage of the example in one regression on all
    (Allen 1974). The penalty and the sharpness are those for which the given labels are likeliest.
    """
    dtype = torch.float64 if features.shape[1] <= EXACT_WIDTH else features.dtype
    targets = F.one_hot(labels, classes).to(dtype)
    mean = targets.mean(0)
    scores, variances, size = _principal_scores(features.to(dtype))
    products, squares = scores.mT @ (targets - mean), scores.square()
    best, least = torch.full_like(targets, 1 / classes), float("inf")
    for penalty in PENALTIES:
        shrinkage = 1 / (variances + penalty * size)
        leverage = squares @ shrinkage + 1 / len(labels)
        fitted = mean + scores @ (shrinkage.unsqueeze(1) * products)
        left_out = targets - (targets - fitted) / (1 - leverage).clamp(min=1e-6).unsqueeze(1)
        for sharpness in SHARPNESS:
            loss = float(F.cross_entropy(sharpness * left_out, labels))
            if loss < least:
                best, least = (sharpness * left_out).softmax(1), loss
    return best


def _principal_scores(
    features: Float[Tensor, "n d"],
) -> tuple[Float[Tensor, "n r"], Float[Tensor, " r"], float]:
    """Centred features along their principal axes, the sum of squares along each, and its mean over the columns."""
    centred = features - features.mean(0)
    n, d = centred.shape
    if n < d:
        variances, axes = torch.linalg.eigh(centred @ centred.mT)
        variances = variances.clamp(min=0)
        scores = axes * variances.sqrt()
    else:
        variances, axes = torch.linalg.eigh(centred.mT @ centred)
        variances, scores = variances.clamp(min=0), centred @ axes
    return scores, variances, max(float(variances.sum()) / d, 1e-12)
