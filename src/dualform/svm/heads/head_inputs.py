r"""The inputs of attention heads: queries, keys, masks, and the matrix that scores tokens.

.. math:: \text{logit} = x^\top W z,\qquad W = s\,W_K^\top [W_Q\; b_Q],\quad z \to (z, 1)

in the space of the layer's input tokens, where one matrix per head scores all of them. A key's bias adds the same
number to all logits of a query and cancels. Where queries and keys are not plain projections of the tokens (rotary
positions, normalisation, pooling, convolution), the head's own space is used, with keys as tokens and :math:`W = s\,I`.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dualform.errors import QueryError

Space = Literal["model", "head"]


@dataclass(frozen=True)
class HeadProjection:
    """The projection that makes the queries, or the keys, of each head.

    ``module`` is the linear layer that contains it, from row ``first`` on; ``shared`` is how many heads use each row.
    """

    weight: Float[Tensor, "H d D"]
    bias: Float[Tensor, "H d"] | None = None
    module: str = ""
    first: int = 0
    shared: int = 1


@dataclass(frozen=True)
class LayerTokens:
    """The input tokens of a layer, z for queries and x for keys, and the projections that it applies to them."""

    z: Float[Tensor, "b n Z"]
    x: Float[Tensor, "b m X"]
    query: HeadProjection
    key: HeadProjection


@dataclass(frozen=True)
class HeadInputs:
    """Several heads in one call of a layer. Their logits are ``scale`` · q·k.

    ``present`` is True at queries that are not padding. ``tokens`` has the layer's input where queries and keys are
    plain projections of it. ``gradient`` is that of a loss at the outputs of the heads.
    """

    heads: tuple[int, ...]
    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b h m d"]
    scale: float
    hidden: Bool[Tensor, "b h n m"]
    present: Bool[Tensor, "b n"]
    values: Float[Tensor, "b h m e"] | None = None
    tokens: LayerTokens | None = None
    gradient: Float[Tensor, "b h n e"] | None = None

    @property
    def space(self) -> Space:
        """The space in which one matrix gives the logits: the model's tokens, or the heads' own keys."""
        return "head" if self.tokens is None else "model"

    def head(
        self, number: int, chosen: Int[Tensor, "c 2"] | None = None, space: Space | None = None
    ) -> "SingleHeadInputs":
        """One head at the ``chosen`` queries, pairs of sequence and position; by default at all that can choose."""
        at = self.heads.index(number)
        chosen = self.selectable_queries() if chosen is None else chosen
        sequence, place = chosen.unbind(1)
        if space == "model" and self.tokens is None:
            raise QueryError(
                f"the logits of head {number} do not come from one matrix of the model's tokens: its queries or keys "
                "are changed after their projections (rotary positions, a normalisation, pooling, another order). Use "
                "space='head'."
            )
        if self.tokens is None or space == "head":
            x, z, W = self.k[:, at], self.q[sequence, at, place], self.scale * torch.eye(self.k.shape[-1]).double()
        else:
            x, z, W = self.tokens.x, self.tokens.z[sequence, place], query_key_matrix(self.tokens, number, self.scale)
            z = z if self.tokens.query.bias is None else torch.cat([z, torch.ones_like(z[:, :1])], 1)
        scores = None
        tokens = self.tokens if (space or self.space) == "model" else None
        if self.gradient is not None and self.values is not None:
            scores = -torch.einsum("ce,cme->cm", self.gradient[sequence, at, place], self.values[sequence, at])
        hidden = self.hidden[sequence, at, place]
        return SingleHeadInputs(number, x, z, sequence, place, hidden, W, self.scale, tokens, scores)

    def selectable_queries(
        self, count: int | None = None, seed: int = 0, head: int | None = None, above: float = 0.0
    ) -> Int[Tensor, "c 2"]:
        """Queries that see more than one token: all of them, or a random sample of ``count``, in order.

        With a ``head``, only those whose largest weight in that head is larger than ``above``.
        """
        visible = (~self.hidden).sum(-1).amin(1)
        places = (self.present & (visible > 1)).nonzero()
        if above and head is not None and len(places):
            places = places[self.head(head, places, "head").logits().softmax(1).amax(1) > above]
        if count is None or len(places) <= count:
            return places
        sample = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:count]
        return places[sample.sort().values]


@dataclass(frozen=True)
class SingleHeadInputs:
    """One head at several queries: the logits are xᵀWz over the tokens of the query's sequence that are not hidden.

    ``tokens`` has the projections that W is made of, in the model's space. ``scores`` are first-order: how fast a loss
    falls as a token's weight grows.
    """

    head: int
    x: Float[Tensor, "b m X"]
    z: Float[Tensor, "c Z"]
    sequence: Int[Tensor, " c"]
    place: Int[Tensor, " c"]
    hidden: Bool[Tensor, "c m"]
    W: Float[Tensor, "X Z"]
    scale: float
    tokens: LayerTokens | None = None
    scores: Float[Tensor, "c m"] | None = None

    @property
    def space(self) -> Space:
        """Whether x are the model's tokens or the head's own keys."""
        return "head" if self.tokens is None else "model"

    def at(self, queries: Int[Tensor, " u"]) -> "SingleHeadInputs":
        """The same head at a selection of its queries."""
        names = ("z", "sequence", "place", "hidden") + (() if self.scores is None else ("scores",))
        return replace(self, **{name: getattr(self, name)[queries] for name in names})

    def logits(self, W: Float[Tensor, "X Z"] | None = None) -> Float[Tensor, "c m"]:
        """The logits that a matrix (None: the head's own) gives the tokens; −∞ where they are hidden."""
        at = self.z @ (self.W if W is None else W).mT
        logits = torch.empty(self.hidden.shape, dtype=at.dtype)
        for rows in torch.arange(len(at)).split(max(1, (1 << 24) // self.x[0].numel())):
            logits[rows] = torch.einsum("cmx,cx->cm", self.x[self.sequence[rows]], at[rows])
        return logits.masked_fill(self.hidden, -torch.inf)


def query_key_matrix(tokens: LayerTokens, head: int, scale: float) -> Float[Tensor, "X Z"]:
    """W of one head. Its logits are exact up to a constant for each query, which the key's bias adds."""
    query = tokens.query.weight[head]
    if tokens.query.bias is not None:
        query = torch.cat([query, tokens.query.bias[head].unsqueeze(1)], 1)
    return scale * tokens.key.weight[head].mT @ query
