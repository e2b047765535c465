r"""Heads as support vector expansions (Nguyen et al. 2023, arXiv 2406.13781, Theorem 1).

.. math:: h_i = \frac{\sum_j v_j\,\Phi(x_i)^\top\Phi(k_j)}{\sum_j \Phi(x_i)^\top\Phi(k_j)}

Keys are training inputs, values rescaled dual variables, and queries x test inputs. This is what each layer computes,
written out: slow, the same for all, and what faster ways are tested against.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from .masked_attention import softmax_of_seen, wide
from .norm import KeyNorm, Statistics
from .pairs import Pairs

KernelName = Literal["exp", "elu"]
"""exp: :math:`\\exp(q^\\top k/\\sqrt d)`. elu: :math:`\\varphi(q)^\\top\\varphi(k)` with φ = elu + 1."""


@dataclass(frozen=True)
class Expansion:
    """Some heads of a layer, and what they are made of.

    The kernel of ``queries`` and ``keys`` is the score. Both are behind the primal layer's own map (convolved,
    normalised, …), but for keys under a softmax whose normalisation differs from query to query: there a changed query
    does what a normalised key would, and ``inputs`` has the latter.
    """

    heads: tuple[int, ...]
    kernel: KernelName
    queries: Float[Tensor, "b h n d"]
    keys: Float[Tensor, "b h *n m d"]
    hidden: Bool[Tensor, "#b #h n m"] | None
    pairs: Pairs
    unnormalised: tuple[KeyNorm, Statistics] | None = None
    """What the keys would be normalised by."""

    @property
    def inputs(self) -> Float[Tensor, "b h *n m d"]:
        """What the regression is fitted on: keys behind the primal map, each query's own where it depends on that."""
        return self.keys if self.unnormalised is None else self.unnormalised[0].keys(self.keys, self.unnormalised[1])

    @property
    def values(self) -> Float[Tensor, "b h m e"]:
        """What each key stands for."""
        return self.pairs.values

    def weights(self) -> Float[Tensor, "b h n m"]:
        """How much each query attends to each key: lines sum to 1, or are zero where no key is seen."""
        q, k = (wide(each) for each in (self.queries, self.keys))
        if self.kernel == "exp":
            return softmax_of_seen(products(q, k) / math.sqrt(q.shape[-1]), self.hidden)
        scores = products(query_features(q), feature_map(k))
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, 0.0)
        return ratio(scores, scores.sum(-1, keepdim=True))

    def outputs(self, dropout: float = 0.0) -> Float[Tensor, "b h n e"]:
        """What the heads give."""
        return F.dropout(self.weights().to(self.values.dtype), dropout, dropout > 0) @ self.values

    def over_tokens(self) -> Float[Tensor, "b h n t"]:
        """The weights, each pair's shared among its tokens."""
        return self.pairs.spread(self.weights())


def products(q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h *n m d"]) -> Float[Tensor, "b h n m"]:
    """The inner product of each query with each key; of its own keys, where it has such."""
    return q @ k.mT if k.ndim == 4 else (q.unsqueeze(-2) @ k.mT).squeeze(-2)


def feature_map(x: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    """elu(x) + 1: positive, so that the normaliser is. Written as it is, −1 + 1 would round small ones to zero."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def query_features(q: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    """φ(q), larger by a factor where it would be next to nothing: that cancels in the ratio."""
    return feature_map(q - q.detach().amax(-1, keepdim=True).clamp(max=0))


def ratio(scores: Float[Tensor, "*s e"], normaliser: Float[Tensor, "*s 1"]) -> Float[Tensor, "*s e"]:
    """Scores over their sum; next to nothing for a query that sees no key, or keys of no weight."""
    least = torch.finfo(normaliser.dtype).tiny * 1e8  # below it, gradients would overflow
    return scores / torch.where(normaliser < least, 1.0, normaliser)


def exponential(
    heads: tuple[int, ...], q: Float[Tensor, "b h n d"], pairs: Pairs, hidden: Bool[Tensor, "#b #h n m"] | None,
    norm: KeyNorm | None, statistics: Statistics | None,
) -> Expansion:  # fmt: skip
    """Heads under a softmax. Statistics that all queries share normalise queries and keys; else queries are changed."""
    k = pairs.keys
    if norm is None or statistics is None:
        return Expansion(heads, "exp", q, k, hidden, pairs)
    if statistics[0].shape[-2] == 1:
        return Expansion(heads, "exp", norm(q, statistics), norm(k, statistics), hidden, pairs)
    return Expansion(heads, "exp", norm.query(q, statistics), k, hidden, pairs, (norm, statistics))
