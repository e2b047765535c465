"""Multi-head softmax attention (Vaswani et al. 2017, arXiv 1706.03762), on torch's fused kernel."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from .expansion import Expansion, exponential
from .heads import MultiHead
from .masked_attention import attend
from .norm import KeyNorm, statistics_of
from .pairs import Pairs

BLOCK = 512
"""The number of queries per block in causal attention with pooled heads."""


@dataclass(frozen=True)
class SoftmaxKernel:
    r"""Weights :math:`\mathrm{softmax}_j(q_i^\top k_j/\sqrt d)`."""

    def outputs(
        self, q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None, dropout: float
    ) -> Float[Tensor, "b h n e"]:
        """The outputs from torch's fused kernel; a normalisation only changes the query."""
        if norm is not None:
            q = norm.query(q, statistics_of(pairs))
        if pairs.own is not None:
            return with_own(q, pairs, dropout)
        hidden = None if pairs.empty is None else pairs.empty[:, None, None, :]
        k, v = pairs.k.to(q.dtype), pairs.v.to(q.dtype)
        return attend(q, k, v, hidden=hidden, causal=pairs.causal, dropout=dropout).to(pairs.v.dtype)

    def expansion(
        self, heads: tuple[int, ...], q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None
    ) -> Expansion:
        """The expansion with normalised queries and keys, as in the primal layer; if causal, with changed queries."""
        statistics = None if norm is None else statistics_of(pairs)
        return exponential(heads, q, pairs, pairs.hidden(q.shape[-2]), norm, statistics)


def with_own(q: Float[Tensor, "b h n d"], pairs: Pairs, dropout: float) -> Float[Tensor, "b h n e"]:
    """Causal attention to complete windows and to each query's own token, in blocks that leave later windows out."""
    assert pairs.own is not None
    k, v, own_k, own_v = (tensor.to(q.dtype) for tensor in (pairs.k, pairs.v, *pairs.own))
    q = q / math.sqrt(q.shape[-1])
    outputs = []
    for first in range(0, q.shape[-2], BLOCK):
        rows = slice(first, first + BLOCK)
        last = min(first + BLOCK, q.shape[-2])
        complete = last // pairs.windows.scale
        late = pairs.late(first, last, complete)
        if pairs.empty is not None:
            late = late | pairs.empty[:, None, None, :complete]
        logits = (q[..., rows, :] @ k[..., :complete, :].mT).masked_fill(late, -torch.inf)
        own_logit = (q[..., rows, :] * own_k[..., rows, :]).sum(-1, keepdim=True)
        weights = F.dropout(torch.cat([logits, own_logit], -1).softmax(-1), dropout, dropout > 0)
        outputs.append(weights[..., :-1] @ v[..., :complete, :] + weights[..., -1:] * own_v[..., rows, :])
    return torch.cat(outputs, -2).to(pairs.v.dtype)


class SoftmaxAttention(MultiHead):
    r"""Standard multi-head attention, :math:`h_i = \sum_j \mathrm{softmax}_j(q_i^\top k_j/\sqrt d)\, v_j`.

    As a support vector expansion (Nguyen et al. 2023, arXiv 2406.13781, Theorem 1) the keys are training inputs and the
    values their dual variables.
    """

    segments: bool = True

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__(width, heads, SoftmaxKernel(), dropout=dropout, bias=bias)
