r"""What all attention layers share: heads, masks, and softmax attention itself.

Axes: ``b`` batch, ``n`` queries, ``m`` keys, ``H`` heads, ``d`` numbers of a head, ``D`` the width of a token (H·d).
``padding`` is True at tokens that are not there, as in torch; ``causal`` hides what comes after a query.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.errors import SizeError

Padding = Bool[Tensor, "b m"] | None


class Heads(nn.Module):
    """Heads that are merged by ``out``. A member of the family says what each gives, in ``head_outputs``.

    ``dropout`` drops attention weights in training.
    """

    out: nn.Linear

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.width, self.heads, self.size = width, heads, exact_ratio("width", width, "heads", heads)
        if not 0 <= dropout < 1:
            raise SizeError(f"dropout={dropout} must lie in [0, 1).")
        self.dropout = dropout

    def forward(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b n D"]:  # fmt: skip
        """Attend from each token of ``x`` to those of ``context`` (None: of ``x`` itself)."""
        return self.out(merge_heads(self.head_outputs(x, context, padding=padding, causal=causal)))

    def head_outputs(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n d"]:  # fmt: skip
        """What each head gives, before the heads are merged."""
        raise NotImplementedError

    @property
    def drop(self) -> float:
        """The share of weights that is dropped now."""
        return self.dropout if self.training else 0.0


class MultiHead(Heads):
    """Heads with one projection each for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__(width, heads, dropout=dropout)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def projected(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"]
    ) -> tuple[Float[Tensor, "b H n d"], Float[Tensor, "b H m d"], Float[Tensor, "b H m d"]]:
        """Queries, keys and values of all heads."""
        q, k, v = self.query(x), self.key(context), self.value(context)
        return split_heads(q, self.heads), split_heads(k, self.heads), split_heads(v, self.heads)


def split_heads(x: Float[Tensor, "b n D"], heads: int) -> Float[Tensor, "b H n d"]:
    """Cut each token into heads."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Float[Tensor, "b H n d"]) -> Float[Tensor, "b n D"]:
    """Put the heads of each token side by side."""
    return x.transpose(1, 2).flatten(-2)


def attend(
    q: Float[Tensor, "b H n d"], k: Float[Tensor, "b H m d"], v: Float[Tensor, "b H m e"], *, padding: Padding = None,
    causal: bool = False, bias: Float[Tensor, "b H #n m"] | None = None, dropout: float = 0.0,
) -> Float[Tensor, "b H n e"]:  # fmt: skip
    r"""Softmax attention on torch's fused kernel.

    .. math:: h_i = \sum_j \mathrm{softmax}_j(q_i^\top k_j/\sqrt d + a_{ij})\, v_j

    ``bias`` is a. A query that sees no key at all gives zeros.
    """
    see_that_they_fit(q, k, causal)
    if padding is None and bias is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout)
    mask = additive_mask(q, k, padding, causal, bias)
    hidden = mask.isneginf().all(-1, keepdim=True)
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.masked_fill(hidden, 0.0), dropout_p=dropout)
    return found.masked_fill(hidden, 0.0)


def attention_weights(
    q: Float[Tensor, "b H n d"], k: Float[Tensor, "b H m d"], *, padding: Padding = None, causal: bool = False,
    bias: Float[Tensor, "b H #n m"] | None = None,
) -> Float[Tensor, "b H n m"]:  # fmt: skip
    """The weights of softmax attention, which the fused kernel never writes down."""
    see_that_they_fit(q, k, causal)
    logits = q @ k.mT / math.sqrt(q.shape[-1]) + additive_mask(q, k, padding, causal, bias)
    return logits.softmax(-1).nan_to_num()


def additive_mask(
    q: Float[Tensor, "b H n d"], k: Float[Tensor, "b H m d"], padding: Padding, causal: bool,
    bias: Float[Tensor, "b H #n m"] | None = None,
) -> Float[Tensor, "b _ n m"]:  # fmt: skip
    """What is added to the logits: −∞ where a key is hidden."""
    n, m = q.shape[-2], k.shape[-2]
    mask = q.new_zeros(1, 1, n, m) if bias is None else bias.expand(*bias.shape[:2], n, m)
    if causal:
        mask = mask.masked_fill(torch.ones(n, m, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    if padding is not None:
        mask = mask.masked_fill(padding[:, None, None, :], -torch.inf)
    return mask.expand(q.shape[0], *mask.shape[1:])


def see_that_they_fit(q: Tensor, k: Tensor, causal: bool) -> None:
    """Causal attention is from tokens to those before them: there must be as many of each."""
    if causal and q.shape[-2] != k.shape[-2]:
        raise SizeError(
            f"causal attention is of a sequence to itself, but there are {q.shape[-2]} queries and {k.shape[-2]} keys."
        )


def exact_ratio(what: str, value: int, by: str, count: int) -> int:
    """One number divided by another, without rest."""
    if count < 1 or value < 1 or value % count:
        known = [i for i in range(1, max(1, value) + 1) if value % i == 0]
        raise SizeError(f"{what}={value} must be a multiple of {by}={count}; divisors of {value} are {known}.")
    return value // count
