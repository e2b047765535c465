r"""Heads as support vector expansions (Nguyen et al. 2023, arXiv 2406.13781, Theorem 1).

.. math:: h_i = \frac{\sum_j v_j\,\Phi(x_i)^\top\Phi(k_j)}{\sum_j \Phi(x_i)^\top\Phi(k_j)}

Keys are training inputs, values rescaled dual variables, and queries x test inputs. An expansion computes the same as
its layer in an explicit form: slow, uniform for all layers, and the reference that faster kernels are tested against.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from .masked_attention import masked_softmax, wide
from .norm import KeyNorm, Statistics
from .pairs import Pairs

KernelName = Literal["exp", "elu"]
"""exp: :math:`\\exp(q^\\top k/\\sqrt d)`. elu: :math:`\\varphi(q)^\\top\\varphi(k)` with φ = elu + 1."""


@dataclass(frozen=True)
class Expansion:
    """A group of heads of a layer as an explicit expansion over keys and values.

    The kernel of ``queries`` and ``keys`` is the score. Both have passed through the primal layer's own map (convolved,
    normalised, …), with one exception: under a softmax whose normalisation differs from query to query, a changed query
    replaces normalised keys, and ``inputs`` has the normalised keys.
    """

    heads: tuple[int, ...]
    kernel: KernelName
    queries: Float[Tensor, "b h n d"]
    keys: Float[Tensor, "b h *n m d"]
    hidden: Bool[Tensor, "#b #h n m"] | None
    pairs: Pairs
    unnormalised: tuple[KeyNorm, Statistics] | None = None
    """The normalisation that would apply to the keys, if it is not applied to them."""

    @property
    def inputs(self) -> Float[Tensor, "b h *n m d"]:
        """The inputs of the regression: keys after the primal map, per query if the map depends on the query."""
        return self.keys if self.unnormalised is None else self.unnormalised[0].keys(self.keys, self.unnormalised[1])

    @property
    def values(self) -> Float[Tensor, "b h m e"]:
        """The values of the pairs."""
        return self.pairs.values

    def weights(self) -> Float[Tensor, "b h n m"]:
        """The attention weights of each query on each key: rows sum to 1, or are zero where no key is seen."""
        q, k = (wide(tensor) for tensor in (self.queries, self.keys))
        if self.kernel == "exp":
            return masked_softmax(products(q, k) / math.sqrt(q.shape[-1]), self.hidden)
        scores = products(query_features(q), feature_map(k))
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, 0.0)
        return ratio(scores, scores.sum(-1, keepdim=True))

    def outputs(self, dropout: float = 0.0) -> Float[Tensor, "b h n e"]:
        """The outputs of the heads."""
        return F.dropout(self.weights().to(self.values.dtype), dropout, dropout > 0) @ self.values

    def over_tokens(self) -> Float[Tensor, "b h n t"]:
        """The attention weights on tokens: that of each pair is shared among its tokens."""
        return self.pairs.spread(self.weights())


def products(q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h *n m d"]) -> Float[Tensor, "b h n m"]:
    """The inner product of each query with each key, or with each of its own keys if queries have their own."""
    return q @ k.mT if k.ndim == 4 else (q.unsqueeze(-2) @ k.mT).squeeze(-2)


def feature_map(x: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    """elu(x) + 1, which is positive; written so that small values are not rounded to zero by −1 + 1."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def query_features(q: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    """φ(q), scaled up where it would underflow: the factor cancels in the ratio."""
    return feature_map(q - q.detach().amax(-1, keepdim=True).clamp(max=0))


def ratio(scores: Float[Tensor, "*s e"], normaliser: Float[Tensor, "*s 1"]) -> Float[Tensor, "*s e"]:
    """Scores divided by their sum; almost zero for a query that sees no key, or only keys without weight."""
    least = torch.finfo(normaliser.dtype).tiny * 1e8  # below it, gradients would overflow
    return scores / torch.where(normaliser < least, 1.0, normaliser)


def exponential(
    heads: tuple[int, ...], q: Float[Tensor, "b h n d"], pairs: Pairs, hidden: Bool[Tensor, "#b #h n m"] | None,
    norm: KeyNorm | None, statistics: Statistics | None,
) -> Expansion:  # fmt: skip
    """The expansion of softmax heads. Statistics shared by all queries normalise both sides; others change queries."""
    k = pairs.keys
    if norm is None or statistics is None:
        return Expansion(heads, "exp", q, k, hidden, pairs)
    if statistics[0].shape[-2] == 1:
        return Expansion(heads, "exp", norm(q, statistics), norm(k, statistics), hidden, pairs)
    return Expansion(heads, "exp", norm.query(q, statistics), k, hidden, pairs, (norm, statistics))
