r"""Heads as support vector expansions (Nguyen et al. 2023, arXiv 2406.13781, Theorem 1).

.. math:: h_i = \frac{\sum_j v_j\,\Phi(x_i)^\top\Phi(k_j)}{\sum_j \Phi(x_i)^\top\Phi(k_j)}

Keys are training inputs, values rescaled dual variables, and queries x test inputs. This is what each layer computes,
written out: slow, the same for all, and what faster ways are tested against.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from .pairs import Padding, Pairs

KernelName = Literal["exp", "elu"]
"""exp: :math:`\\exp(q^\\top k/\\sqrt d)`. elu: :math:`\\varphi(q)^\\top\\varphi(k)` with φ = elu + 1."""


@dataclass(frozen=True)
class Expansion:
    """Some heads of a layer, and what they are made of.

    ``queries`` and ``keys`` are behind the primal layer's own map (centred and scaled by a batch normalisation,
    convolved, …), so that their kernel is the score. Where the map depends on the query, each has keys of its own.
    """

    heads: tuple[int, ...]
    kernel: KernelName
    queries: Float[Tensor, "b h n d"]
    keys: Float[Tensor, "b h *n m d"]
    hidden: Bool[Tensor, "#b #h n m"] | None
    pairs: Pairs

    @property
    def values(self) -> Float[Tensor, "b h m e"]:
        """What each key stands for."""
        return self.pairs.values

    @property
    def first(self) -> Int[Tensor, " w"]:
        """The first token of each key's window."""
        return torch.from_numpy(self.pairs.windows.first)

    @property
    def last(self) -> Int[Tensor, " w"]:
        """The last token of each key's window."""
        return torch.from_numpy(self.pairs.windows.last)

    def weights(self) -> Float[Tensor, "b h n m"]:
        """How much each query attends to each key: lines sum to 1, or are zero where no key is seen."""
        if self.kernel == "exp":
            logits = products(self.queries, self.keys) / math.sqrt(self.queries.shape[-1])
            if self.hidden is not None:
                logits = logits.masked_fill(self.hidden, -float("inf"))
            return logits.softmax(-1).nan_to_num()
        scores = products(feature_map(self.queries), feature_map(self.keys))
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, 0.0)
        return ratio(scores, scores.sum(-1, keepdim=True))

    def outputs(self, dropout: float = 0.0) -> Float[Tensor, "b h n e"]:
        """What the heads give."""
        return F.dropout(self.weights(), dropout, dropout > 0) @ self.values

    def over_tokens(self, padding: Padding = None) -> Float[Tensor, "b h n t"]:
        """The weights, each pair's shared among its tokens."""
        return self.pairs.spread(self.weights(), padding)


def products(q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h *n m d"]) -> Float[Tensor, "b h n m"]:
    """The inner product of each query with each key; of its own keys, where it has such."""
    return q @ k.mT if k.ndim == 4 else (q.unsqueeze(-2) @ k.mT).squeeze(-2)


def feature_map(x: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    """elu(x) + 1: positive, so that the normaliser is. Written as it is, −1 + 1 would round small ones to zero."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def ratio(scores: Float[Tensor, "*s e"], normaliser: Float[Tensor, "*s 1"]) -> Float[Tensor, "*s e"]:
    """Scores over their sum; next to nothing for a query that sees no key, or keys of no weight."""
    least = torch.finfo(normaliser.dtype).tiny * 1e8  # below it, gradients would overflow
    return scores / torch.where(normaliser < least, 1.0, normaliser)
