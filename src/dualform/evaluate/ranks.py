"""Ranks, and correlations of ranks. Equal values share the mean of their ranks."""

import torch
from jaxtyping import Float
from torch import Tensor


def ranks(values: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
    """The rank of each value along the last axis, from 0; ties get the mean of the ranks that they cover."""
    ordered, order = values.double().contiguous().sort(dim=-1)
    first = torch.searchsorted(ordered, ordered, side="left")
    last = torch.searchsorted(ordered, ordered, side="right")
    mean = (first + last - 1).double() / 2
    return torch.zeros_like(mean).scatter(-1, order, mean)


def spearman(a: Float[Tensor, "... n"], b: Float[Tensor, "... n"]) -> Float[Tensor, "..."]:
    """Spearman's rank correlation along the last axis; NaN where all values of one side are equal."""
    a, b = (ranks(side) for side in (a, b))
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()
