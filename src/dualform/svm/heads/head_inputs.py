r"""What the heads of an attention layer see: queries, keys, who sees whom, and the matrix that scores them.

.. math:: \text{logit} = x^\top W z,\qquad W = s\,W_K^\top [W_Q\; b_Q],\quad z \to (z, 1)

in the space of the tokens that the layer is given, where one matrix a head scores them all. A key's bias adds the same
to all logits of a query and cancels. Where something else shapes queries and keys (rotary positions, normalisation,
pooling, convolution), the layer is seen in the space of its heads, with keys as tokens and :math:`W = s\,I`.
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
    """What makes the queries, or the keys, of each head. ``module`` is the layer inside that has it, from row ``first``
    on, where so many heads have each row ``shared``.
    """

    weight: Float[Tensor, "H d D"]
    bias: Float[Tensor, "H d"] | None = None
    module: str = ""
    first: int = 0
    shared: int = 1


@dataclass(frozen=True)
class LayerTokens:
    """What a layer is given, and how it makes queries of some and keys of others."""

    z: Float[Tensor, "b n Z"]
    x: Float[Tensor, "b m X"]
    query: HeadProjection
    key: HeadProjection


@dataclass(frozen=True)
class HeadInputs:
    """Some heads in one call of a layer. Their logits are ``scale`` · q·k.

    ``asked`` are the queries that are there, ``tokens`` what queries and keys are made of where that is a matrix each,
    ``gradient`` that of a loss at the outputs of the heads.
    """

    heads: tuple[int, ...]
    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b h m d"]
    scale: float
    hidden: Bool[Tensor, "b h n m"]
    asked: Bool[Tensor, "b n"]
    values: Float[Tensor, "b h m e"] | None = None
    tokens: LayerTokens | None = None
    gradient: Float[Tensor, "b h n e"] | None = None

    @property
    def space(self) -> Space:
        """Where these heads are one matrix."""
        return "head" if self.tokens is None else "model"

    def head(
        self, number: int, chosen: Int[Tensor, "c 2"] | None = None, space: Space | None = None
    ) -> "SingleHeadInputs":
        """One head at some queries, each given by its sequence and place; at all that there are by default."""
        at = self.heads.index(number)
        chosen = self.choices() if chosen is None else chosen
        sequence, place = chosen.unbind(1)
        if space == "model" and self.tokens is None:
            raise QueryError(
                f"head {number} is no matrix of the model's tokens that can be seen: something shapes its queries or "
                "keys behind their projections (rotary positions, a normalisation, pooling, another order). Look at it "
                "with space='head'."
            )
        if self.tokens is None or space == "head":
            x, z, W = self.k[:, at], self.q[sequence, at, place], self.scale * torch.eye(self.k.shape[-1]).double()
        else:
            x, z, W = self.tokens.x, self.tokens.z[sequence, place], matrix(self.tokens, number, self.scale)
            z = z if self.tokens.query.bias is None else torch.cat([z, torch.ones_like(z[:, :1])], 1)
        scores = None
        tokens = self.tokens if (space or self.space) == "model" else None
        if self.gradient is not None and self.values is not None:
            scores = -torch.einsum("ce,cme->cm", self.gradient[sequence, at, place], self.values[sequence, at])
        hidden = self.hidden[sequence, at, place]
        return SingleHeadInputs(number, x, z, sequence, place, hidden, W, self.scale, tokens, scores)

    def choices(
        self, count: int | None = None, seed: int = 0, head: int | None = None, above: float = 0.0
    ) -> Int[Tensor, "c 2"]:
        """Queries that have something to choose from: all of them, or so many by chance, in their order.

        Of one head only those whose largest weight is ``above`` a number.
        """
        seen = (~self.hidden).sum(-1).amin(1)
        found = (self.asked & (seen > 1)).nonzero()
        if above and head is not None and len(found):
            found = found[self.head(head, found, "head").logits().softmax(1).amax(1) > above]
        if count is None or len(found) <= count:
            return found
        some = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))[:count]
        return found[some.sort().values]


@dataclass(frozen=True)
class SingleHeadInputs:
    """One head at some queries: logits are xᵀWz over the tokens of the query's sequence that are not hidden.

    ``tokens`` is what W is made of, where the head is seen in the model's space. ``scores`` say how much a loss would
    fall if a token got more weight, as far as its gradient tells.
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
        """Whose tokens these are: the model's, or keys of the head itself."""
        return "head" if self.tokens is None else "model"

    def at(self, queries: Int[Tensor, " u"]) -> "SingleHeadInputs":
        """The same head at some of these queries."""
        names = ("z", "sequence", "place", "hidden") + (() if self.scores is None else ("scores",))
        return replace(self, **{name: getattr(self, name)[queries] for name in names})

    def logits(self, W: Float[Tensor, "X Z"] | None = None) -> Float[Tensor, "c m"]:
        """What a matrix (None: the head's own) scores the tokens; −∞ where they are hidden."""
        at = self.z @ (self.W if W is None else W).mT
        found = torch.empty(self.hidden.shape, dtype=at.dtype)
        for some in torch.arange(len(at)).split(max(1, (1 << 24) // self.x[0].numel())):
            found[some] = torch.einsum("cmx,cx->cm", self.x[self.sequence[some]], at[some])
        return found.masked_fill(self.hidden, -torch.inf)


def matrix(tokens: LayerTokens, head: int, scale: float) -> Float[Tensor, "X Z"]:
    """W of one head: what its logits are made with, but for what is the same for all tokens of a query."""
    query = tokens.query.weight[head]
    if tokens.query.bias is not None:
        query = torch.cat([query, tokens.query.bias[head].unsqueeze(1)], 1)
    return scale * tokens.key.weight[head].mT @ query
