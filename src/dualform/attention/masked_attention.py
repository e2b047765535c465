r"""Masked softmax attention, and the splitting of tokens into heads that all attention layers share.

Axes: ``b`` batch, ``n`` queries, ``m`` keys, ``h`` some heads, ``H`` all heads, ``d`` channels of a head, ``D`` the
width of a token (H·d). ``padding`` is True at padding tokens, as in torch; ``causal`` hides the tokens after a query.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from dualform.errors import SizeError

Mode = Literal["clean", "reference"]
"""The behaviour that we recommend, or that of a paper's released code."""


def split_heads(x: Float[Tensor, "b n D"], heads: int) -> Float[Tensor, "b H n d"]:
    """Split each token into heads."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Float[Tensor, "b H n d"]) -> Float[Tensor, "b n D"]:
    """Concatenate the heads of each token."""
    return x.transpose(1, 2).flatten(-2)


def attend(
    q: Float[Tensor, "*b n d"], k: Float[Tensor, "*c m d"], v: Float[Tensor, "*c m e"], *,
    hidden: Bool[Tensor, "*#b #n m"] | None = None, causal: bool = False, dropout: float = 0.0,
) -> Float[Tensor, "*b n e"]:  # fmt: skip
    r"""Softmax attention on torch's fused kernel.

    .. math:: h_i = \sum_j \mathrm{softmax}_j(q_i^\top k_j/\sqrt d)\, v_j

    ``hidden`` is True where a query does not see a key. The output of a query that sees no key is zero. With ``causal``
    the queries are the last tokens of the sequence. If there are fewer heads of keys than of queries, each is shared by
    a run of query heads without being copied.
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
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=shared)
    return output.masked_fill(blind, 0.0)


def masked_softmax(
    logits: Float[Tensor, "*b n m"], hidden: Bool[Tensor, "*#b #n m"] | None, *, blind: bool = True
) -> Float[Tensor, "*b n m"]:
    """Softmax over the keys that are not hidden. ``blind``: a query that sees no key gets zeros instead of NaN."""
    if hidden is None:
        return logits.softmax(-1)
    none = hidden.all(-1, keepdim=True)
    weights = logits.masked_fill(hidden & ~none, -torch.inf).softmax(-1)
    return weights.masked_fill(none, 0.0) if blind else weights


def wide(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Convert to float32 or wider: sums over many tokens exceed the range of half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_sequences(
    x: Tensor, context: Tensor, padding: Tensor | None, width: int, causal: bool, segments: bool = False
) -> None:
    """Require queries and context of the right width, equal batch sizes and a matching padding mask.

    Causal attention is from a sequence to itself or, where a layer takes ``segments``, from its end to all of it.
    """
    for name, sequence in (("x", x), ("context", context)):
        if sequence.ndim != 3 or sequence.shape[-1] != width or sequence.shape[1] == 0:
            raise SizeError(
                f"{name} is {tuple(sequence.shape)}, but must be (batch, tokens, width={width}), with 1 token or more."
            )
    batch, tokens = context.shape[:2]
    if len(x) != batch:
        raise SizeError(f"x has a batch of {len(x)}, but context has one of {batch}.")
    if padding is not None and (padding.dtype != torch.bool or padding.shape != (batch, tokens)):
        raise SizeError(
            f"padding is {padding.dtype} of {tuple(padding.shape)}, but must be bool of {(batch, tokens)}: True at the "
            "tokens of the context that are padding."
        )
    if causal and (x.shape[1] > tokens if segments else x.shape[1] != tokens):
        origin = "a sequence, or from its end," if segments else "a sequence"
        raise SizeError(
            f"causal attention is from {origin} to itself, but there are {x.shape[1]} queries and {tokens} keys."
        )
