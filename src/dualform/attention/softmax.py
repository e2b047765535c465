"""Multi-head softmax attention (Vaswani et al. 2017, arXiv 1706.03762), on torch's fused kernel."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from .core import attend
from .expansion import Expansion
from .heads import MultiHead
from .norm import KeyNorm, statistics_of
from .pairs import Pairs


@dataclass(frozen=True)
class Softmax:
    r"""Weights :math:`\mathrm{softmax}_j(q_i^\top k_j/\sqrt d)`."""

    def outputs(
        self, q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None, dropout: float
    ) -> Float[Tensor, "b h n e"]:
        """On the fused kernel: a normalisation changes the query alone."""
        if norm is not None:
            q = norm.query(q, statistics_of(pairs))
        if pairs.own is not None:
            return with_own(q, pairs, dropout)
        hidden = None if pairs.empty is None else pairs.empty[:, None, None, :]
        return attend(q, pairs.k, pairs.v, hidden=hidden, causal=pairs.causal, dropout=dropout)

    def expansion(
        self, heads: tuple[int, ...], q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None
    ) -> Expansion:
        """With normalised queries and keys, as the primal layer has them; where it is causal, changed queries."""
        k = pairs.keys
        if norm is not None:
            statistics = statistics_of(pairs)
            q, k = (norm.query(q, statistics), k) if pairs.causal else (norm(q, statistics), norm(k, statistics))
        return Expansion(heads, "exp", q, k, pairs.hidden(q.shape[-2]), pairs)


def with_own(q: Float[Tensor, "b h n d"], pairs: Pairs, dropout: float) -> Float[Tensor, "b h n e"]:
    """Causal attention to complete windows and to each query's own token."""
    assert pairs.own is not None
    own_k, own_v = pairs.own
    late = torch.from_numpy(pairs.windows.end > np.arange(q.shape[-2])[:, None]).to(q.device)
    if pairs.empty is not None:
        late = late | pairs.empty[:, None, None, :]
    logits = (q @ pairs.k.mT).masked_fill(late, -torch.inf)
    mine = (q * own_k).sum(-1, keepdim=True)
    weights = (torch.cat([logits, mine], -1) / math.sqrt(q.shape[-1])).softmax(-1)
    weights = F.dropout(weights, dropout, dropout > 0)
    return weights[..., :-1] @ pairs.v + weights[..., -1:] * own_v


class SoftmaxAttention(MultiHead):
    r"""Attention as everybody knows it: :math:`h_i = \sum_j \mathrm{softmax}_j(q_i^\top k_j/\sqrt d)\, v_j`.

    As a support vector expansion (Nguyen et al. 2023, arXiv 2406.13781, Theorem 1) the keys are training inputs and the
    values their dual variables.
    """

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__(width, heads, Softmax(), dropout=dropout, bias=bias)
