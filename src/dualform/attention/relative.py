r"""Relative attention: the weight of a key also depends on its distance from the query (RMHA).

.. math:: s_{ij} = \frac{(q_i + u)^\top k_j + q_i^\top R_\delta + S_\delta}{\sqrt d},\qquad \delta = j - (m - n + i)

The n queries are the last n of the m tokens attended to, so ``layer(x, torch.cat([memory, x], 1), causal=True)`` is a
segment that follows remembered tokens. R, S and u are learned for each head (Dai et al. 2019, Transformer-XL, arXiv
1901.02860; tables instead of sinusoids as in the released code of Sugiharto et al. 2023, arXiv 2308.03429).
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.arguments import exact_ratio, one_of
from dualform.errors import SizeError

from .expansion import Expansion
from .heads import MultiHead
from .masked_attention import masked_softmax
from .norm import KeyNorm
from .pairs import Pairs
from .positions import SinusoidPositions, TablePositions, one_for_all, shifted

PositionName = Literal["table", "sinusoid"]


class RelativeSoftmaxKernel(nn.Module):
    """Softmax over relative scores: a kernel with parameters, initially zero, so that it starts as a plain softmax.

    As a support vector expansion each query has keys of its own, [k_j; R_δ; S_δ] for the query [q_i + u; q_i; 1].
    """

    def __init__(self, width: int, heads: int, *, pos: PositionName = "table", reach: int = 512) -> None:
        super().__init__()
        self.heads, self.size = heads, exact_ratio("width", width, "heads", heads)
        self.u = nn.Embedding(1, width)
        nn.init.zeros_(self.u.weight)
        table = one_of("pos", pos, ("table", "sinusoid")) == "table"
        self.position = TablePositions(width, heads, reach) if table else SinusoidPositions(width, heads)

    def outputs(
        self, q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None, dropout: float
    ) -> Float[Tensor, "b h n e"]:
        """The softmax of explicit scores: torch's fused kernel has no gradient for terms added to scores."""
        reject_normalisation(norm)
        scores = self.scores(q, pairs.k, causal=pairs.causal)
        weights = masked_softmax(scores, pairs.hidden(q.shape[-2]), blind=pairs.empty is not None)
        return (F.dropout(weights, dropout) if dropout else weights) @ pairs.v

    def scores(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h m d"], *, causal: bool = False
    ) -> Float[Tensor, "b h n m"]:
        """The score of each query and key. With ``causal``, the scores of later keys are undefined."""
        n, m, root = q.shape[-2], k.shape[-2], math.sqrt(self.size)
        vectors, numbers = self.position(len(q), -m, 1 if causal else n)
        far = with_one(q) / root @ torch.cat([vectors, numbers.unsqueeze(-1)], -1).mT  # b h n c
        return (q + self._u(q)) / root @ k.mT + shifted(far, m)

    def expansion(
        self, heads: tuple[int, ...], q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None
    ) -> Expansion:
        """The expansion without the shift: queries [q + u; q; 1], rescaled for their length, with keys per query."""
        reject_normalisation(norm)
        n, m = q.shape[-2], pairs.k.shape[-2]
        vectors, numbers = self.position(len(q), -m, n)
        column = n - torch.arange(n).unsqueeze(-1) + torch.arange(m)  # n m
        keys_by_query = pairs.k.unsqueeze(-3).expand(-1, -1, n, -1, -1)
        keys = torch.cat([keys_by_query, vectors[:, :, column], numbers[:, :, column].unsqueeze(-1)], -1)
        queries = torch.cat([q + self._u(q), with_one(q)], -1)
        return Expansion(
            heads, "exp", queries * math.sqrt(keys.shape[-1] / self.size), keys, pairs.hidden(n), pairs
        )  # fmt: skip

    def _u(self, q: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h 1 d"]:
        return one_for_all(self.u, len(q), self.heads)


def reject_normalisation(norm: KeyNorm | None) -> None:
    """Reject a normalisation: statistics of keys would have to include positions, which no such attention defines."""
    if norm is not None:
        raise SizeError("relative scores need keys that are not normalised: use them without batch normalisation.")


def with_one(q: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d+1"]:
    """[q; 1], whose product with [R; S] is q·R + S."""
    return F.pad(q, (0, 1), value=1.0)


class RelativeAttention(MultiHead):
    """Multi-head attention with relative positions in its scores, so that it needs no other positions.

    ``pos`` is "table", a free vector and number for every offset up to ``reach`` tokens away, or "sinusoid", the
    positions of Transformer-XL. Queries are the last tokens of the context, even if it is not causal or the context is
    shorter than the queries: then the first queries come before it. Queries and keys have no bias unless ``qk_bias``:
    u and S have the same effect.
    """

    segments: bool = True

    def __init__(
        self, width: int, heads: int, *, pos: PositionName = "table", reach: int = 512, dropout: float = 0.0,
        bias: bool = True, qk_bias: bool = False,
    ) -> None:  # fmt: skip
        kernel = RelativeSoftmaxKernel(width, heads, pos=pos, reach=reach)
        super().__init__(width, heads, kernel, dropout=dropout, bias=bias, qk_bias=qk_bias)
