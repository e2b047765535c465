r"""What all attention layers are made of: heads, masks, and softmax attention itself.

Axes: ``b`` batch, ``n`` queries, ``m`` keys, ``h`` some heads, ``H`` all heads, ``d`` numbers of a head, ``D`` the
width of a token (H·d). ``padding`` is True at tokens that are not there, as in torch; ``causal`` hides what comes after
a query.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from dualform.errors import SizeError

Mode = Literal["clean", "reference"]
"""What we would do, or what the released code of a paper does."""


def split_heads(x: Float[Tensor, "b n D"], heads: int) -> Float[Tensor, "b H n d"]:
    """Cut each token into heads."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Float[Tensor, "b H n d"]) -> Float[Tensor, "b n D"]:
    """Put the heads of each token side by side."""
    return x.transpose(1, 2).flatten(-2)


def attend(
    q: Float[Tensor, "*b n d"], k: Float[Tensor, "*c m d"], v: Float[Tensor, "*c m e"], *,
    hidden: Bool[Tensor, "*#b #n m"] | None = None, causal: bool = False, dropout: float = 0.0,
) -> Float[Tensor, "*b n e"]:  # fmt: skip
    r"""Softmax attention on torch's fused kernel.

    .. math:: h_i = \sum_j \mathrm{softmax}_j(q_i^\top k_j/\sqrt d)\, v_j

    ``hidden`` is True where a query does not see a key. A query that sees no key at all gives zeros. Where it is
    ``causal`` the queries are the last of the tokens. Where there are fewer heads of keys than of queries, each is
    shared by a run of them, and none is copied.
    """
    n, m, shared = q.shape[-2], k.shape[-2], q.shape[:-2] != k.shape[:-2]
    if hidden is None and (n == m or not causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout, enable_gqa=shared)
    if causal:
        later = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(1 + m - n)
        hidden = later if hidden is None else hidden | later
    assert hidden is not None
    blind = hidden.all(-1, keepdim=True)
    mask = q.new_zeros(()).masked_fill(hidden & ~blind, -torch.inf)
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=shared)
    return found.masked_fill(blind, 0.0)


def softmax_of_seen(
    logits: Float[Tensor, "*b n m"], hidden: Bool[Tensor, "*#b #n m"] | None, *, blind: bool = True
) -> Float[Tensor, "*b n m"]:
    """Softmax over the keys that are not hidden; zeros for a query that sees none, if one may be ``blind``."""
    if hidden is None:
        return logits.softmax(-1)
    none = hidden.all(-1, keepdim=True)
    weights = logits.masked_fill(hidden & ~none, -torch.inf).softmax(-1)
    return weights.masked_fill(none, 0.0) if blind else weights


def wide(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """In float32 at least: sums over many tokens leave the range of half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def see_that_they_fit(
    x: Tensor, context: Tensor, padding: Tensor | None, width: int, causal: bool, segments: bool = False
) -> None:
    """Sequences of tokens of one width, as many of each as there are in the batch, and a mask for those attended to.

    Causal attention is of a sequence to itself or, where a layer takes ``segments``, of its end to all of it.
    """
    for name, each in (("x", x), ("context", context)):
        if each.ndim != 3 or each.shape[-1] != width or each.shape[1] == 0:
            raise SizeError(
                f"{name} is {tuple(each.shape)}, and must be (batch, tokens, width={width}), 1 token or more."
            )
    batch, tokens = context.shape[:2]
    if len(x) != batch:
        raise SizeError(f"x has a batch of {len(x)}, and context one of {batch}.")
    if padding is not None and (padding.dtype != torch.bool or padding.shape != (batch, tokens)):
        raise SizeError(
            f"padding is {padding.dtype} of {tuple(padding.shape)}, and must be bool of {(batch, tokens)}: True at the "
            "tokens attended to that are not there."
        )
    if causal and (x.shape[1] > tokens if segments else x.shape[1] != tokens):
        whose = "a sequence, or of its end," if segments else "a sequence"
        raise SizeError(
            f"causal attention is of {whose} to itself, but there are {x.shape[1]} queries and {tokens} keys."
        )
