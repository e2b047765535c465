r"""Feature selection for a head: a group lasso over the columns of its weights, and the largest columns.

.. math:: \Omega(W) = \sum_j \lVert W_{:,j} \rVert_2

Reference: Evci et al. (2022), arXiv 2201.03529; as in Tu, Mai, Chao (2023), arXiv 2212.03220.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.attention import wide
from dualform.errors import SizeError


def feature_scores(weight: Float[Tensor, "classes F"]) -> Float[Tensor, " F"]:
    """The importance of each feature: the norm of its column in the head. A zero column has a zero gradient."""
    return torch.linalg.vector_norm(wide(weight), dim=0)


def group_lasso(weight: Float[Tensor, "classes F"]) -> Float[Tensor, ""]:
    """The sum of the scores: added to a loss, it pulls whole columns to zero. Biases are not included."""
    return feature_scores(weight).sum()


def select(weight: Float[Tensor, "classes F"], keep: float) -> Int[Tensor, " k"]:
    """The indices of the ⌊keep · F⌋ features with the largest scores, in rising order."""
    count = math.floor(keep * weight.shape[1] + 1e-9) if 0 < keep <= 1 else 0  # 0.7 · 10 is a little less than 7
    if count < 1:
        raise SizeError(f"keep={keep} of {weight.shape[1]} features: it must lie in (0, 1] and leave at least 1.")
    scores = feature_scores(weight.detach())
    if not bool(scores.isfinite().all()):
        raise SizeError("the weights hold NaN or infinity, so their columns cannot be compared: train the head again.")
    return scores.topk(count).indices.sort().values
