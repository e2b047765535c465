r"""Attention-BN: a batch normalisation layer in the primal (Nguyen et al. 2023, arXiv 2406.13781).

Keys and queries are centred and scaled by the statistics of the keys, per head and feature, over the tokens of a
sequence. What is constant in j cancels in the softmax, so only the query needs changing, and fused kernels stay in use:

.. math:: \tilde q_i = (q_i - \beta\mu) \odot \frac{1}{\sigma^2 + \varepsilon},\qquad
    h_i = \sum_j \mathrm{softmax}_j(\tilde q_i^\top k_j/\sqrt d)\, v_j

The paper's exact formula was not at hand: β, ``use_var`` and ε are switches, with strict batch normalisation (β = 1) as
the default.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .core import MultiHead, Padding, attend, attention_weights, see_that_they_fit

Statistics = tuple[Float[Tensor, "b H #n d"], Float[Tensor, "b H #n d"]]
"""Mean and (biased) variance of the keys; one for each query where it is causal."""


def key_statistics(k: Float[Tensor, "b H m d"], padding: Padding = None) -> Statistics:
    """Mean and variance over the keys that are there."""
    if padding is None:
        mean = k.mean(-2, keepdim=True)
        return mean, (k - mean).square().mean(-2, keepdim=True)
    there = (~padding)[:, None, :, None].to(k.dtype)
    count = there.sum(-2, keepdim=True).clamp(min=1)
    mean = (k * there).sum(-2, keepdim=True) / count
    return mean, ((k - mean).square() * there).sum(-2, keepdim=True) / count


def prefix_statistics(k: Float[Tensor, "b H n d"], padding: Padding = None) -> Statistics:
    """Mean and variance of the keys up to each token: the future must not leak into the past.

    Sums are taken around the first key, so that an offset of all keys costs no precision.
    """
    there = torch.ones_like(k[..., :1]) if padding is None else (~padding)[:, None, :, None].to(k.dtype)
    origin = k[..., :1, :].detach()
    wide = ((k - origin) * there).to(torch.promote_types(k.dtype, torch.float32))
    count = there.to(wide.dtype).cumsum(-2).clamp(min=1)
    mean = wide.cumsum(-2) / count
    variance = (wide.square().cumsum(-2) / count - mean.square()).clamp(min=0)
    return (mean + origin).to(k.dtype), variance.to(k.dtype)


def statistics_of(k: Float[Tensor, "b H m d"], padding: Padding, causal: bool) -> Statistics:
    """Those of all keys, or where it is causal of those up to each token."""
    return prefix_statistics(k, padding) if causal else key_statistics(k, padding)


def normalised_query(
    q: Float[Tensor, "b H n d"], statistics: Statistics, *, beta: Any = 1.0, use_var: bool = True, eps: float = 1e-5
) -> Float[Tensor, "b H n d"]:
    r"""The query that makes softmax attention Attention-BN: :math:`(q - \beta\mu)/(\sigma^2 + \varepsilon)`."""
    mean, variance = statistics
    centred = q - beta * mean
    return centred / (variance + eps) if use_var else centred


class BatchNormAttention(MultiHead):
    """Attention-BN. No parameter is added; with ``beta=0, use_var=False`` it is softmax attention.

    ``learnable_beta`` makes β a parameter, one number a head (an extension).
    """

    def __init__(
        self, width: int, heads: int, *, beta: float = 1.0, use_var: bool = True, eps: float = 1e-5,
        learnable_beta: bool = False, dropout: float = 0.0, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(width, heads, dropout=dropout, bias=bias)
        self.use_var, self.eps = use_var, eps
        self.beta: Any = nn.Parameter(torch.full((heads, 1, 1), beta)) if learnable_beta else beta

    def head_outputs(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n d"]:  # fmt: skip
        """What each head gives, before the heads are merged."""
        q, k, v = self._projected(x, context, padding, causal)
        return attend(q, k, v, padding=padding, causal=causal, dropout=self.drop)

    def weights(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n m"]:  # fmt: skip
        """How much each token attends to each other one, head by head."""
        q, k, _ = self._projected(x, context, padding, causal)
        return attention_weights(q, k, padding=padding, causal=causal)

    def _projected(self, x: Tensor, context: Tensor | None, padding: Padding, causal: bool) -> tuple[Tensor, ...]:
        q, k, v = self.projected(x, x if context is None else context)
        see_that_they_fit(q, k, causal)
        found = statistics_of(k, padding, causal)
        return normalised_query(q, found, beta=self.beta, use_var=self.use_var, eps=self.eps), k, v
