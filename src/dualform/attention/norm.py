"""Statistics of the keys that a head sees, and batch normalisation by them."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from .pairs import Padding, Pairs

Statistics = tuple[Float[Tensor, "b h *c #n d"], Float[Tensor, "b h *c #n d"]]
"""Mean and (biased) variance of the keys; one for each query where it is causal."""


def key_statistics(k: Float[Tensor, "b h m d"], padding: Padding = None) -> Statistics:
    """Mean and variance over the keys that are there."""
    if padding is None:
        mean = k.mean(-2, keepdim=True)
        return mean, (k - mean).square().mean(-2, keepdim=True)
    there = (~padding)[:, None, :, None].to(k.dtype)
    count = there.sum(-2, keepdim=True).clamp(min=1)
    mean = (k * there).sum(-2, keepdim=True) / count
    return mean, ((k - mean).square() * there).sum(-2, keepdim=True) / count


def prefix_statistics(k: Float[Tensor, "b h n d"], padding: Padding = None) -> Statistics:
    """Mean and variance of the keys up to each token: the future must not leak into the past.

    Sums are taken around the first key, so that an offset of all keys costs no precision.
    """
    origin = k[..., :1, :].detach()
    ones, sums, squares = _sums(k, origin, padding)
    return _moments(ones, sums, squares, origin, k.dtype)


def window_statistics(pairs: Pairs) -> Statistics:
    """Mean and variance of the keys that each query of a causal head sees: complete windows, and its own."""
    assert pairs.own is not None
    own = pairs.own[0]
    origin = own[..., :1, :].detach()
    complete = (torch.arange(own.shape[-2], device=own.device) + 1) // pairs.windows.scale
    sums = (F.pad(each, (0, 0, 1, 0))[..., complete, :] for each in _sums(pairs.k, origin, pairs.empty))
    mine = (own - origin).to(torch.promote_types(own.dtype, torch.float32))
    ones, first, second = (a + b for a, b in zip(sums, (1.0, mine, mine.square()), strict=True))
    return _moments(ones, first, second, origin, own.dtype)


def _sums(k: Tensor, origin: Tensor, padding: Padding) -> tuple[Tensor, Tensor, Tensor]:
    """Running counts, sums and sums of squares around an origin."""
    there = torch.ones_like(k[:1, :1, :, :1]) if padding is None else (~padding)[:, None, :, None].to(k.dtype)
    wide = ((k - origin) * there).to(torch.promote_types(k.dtype, torch.float32))
    return there.to(wide.dtype).cumsum(-2), wide.cumsum(-2), wide.square().cumsum(-2)


def _moments(count: Tensor, sums: Tensor, squares: Tensor, origin: Tensor, dtype: torch.dtype) -> Statistics:
    count = count.clamp(min=1)
    mean = sums / count
    variance = (squares / count - mean.square()).clamp(min=0)
    return (mean + origin).to(dtype), variance.to(dtype)


def subset_statistics(k: Float[Tensor, "b h *c m d"], seen: Bool[Tensor, "*s n m"]) -> Statistics:
    """Mean and variance of the keys that each query sees."""
    origin = k[..., :1, :].detach()
    there = seen.to(k.dtype)
    mean, squares = there @ (k - origin), there @ (k - origin).square()
    return _moments(there.sum(-1, keepdim=True), mean, squares, origin, k.dtype)


def statistics_of(pairs: Pairs) -> Statistics:
    """Those of all keys or, where it is causal, of those that each query may see."""
    if pairs.own is not None:
        return window_statistics(pairs)
    return (prefix_statistics if pairs.causal else key_statistics)(pairs.k, pairs.empty)


class KeyNorm(nn.Module):
    """Batch normalisation by the statistics of the keys. ``learnable_beta``: one β a head, trained (an extension)."""

    def __init__(self, heads: int, *, beta: float, use_var: bool, eps: float, learnable_beta: bool = False) -> None:
        super().__init__()
        self.use_var, self.eps = use_var, eps
        self.beta: Any = nn.Parameter(torch.full((heads, 1, 1), beta)) if learnable_beta else beta

    def query(self, q: Float[Tensor, "b h *c n d"], statistics: Statistics) -> Float[Tensor, "b h *c n d"]:
        r"""The query that makes softmax attention Attention-BN: :math:`(q - \beta\mu)/(\sigma^2 + \varepsilon)`."""
        return normalised_query(q, statistics, beta=self._beta(q), use_var=self.use_var, eps=self.eps)

    def forward(self, x: Float[Tensor, "b h *n m d"], statistics: tuple[Tensor, Tensor]) -> Float[Tensor, "b h *q m d"]:
        r"""Queries or keys as the primal layer has them: :math:`(x - \beta\mu)/\sqrt{\sigma^2 + \varepsilon}`."""
        mean, variance = statistics
        centred = x - self._beta(x) * mean
        return centred * (variance + self.eps).rsqrt() if self.use_var else centred

    def _beta(self, x: Tensor) -> Any:
        return self.beta.reshape(-1, *(1,) * (x.ndim - 2)) if isinstance(self.beta, Tensor) else self.beta


def normalised_query(
    q: Float[Tensor, "b h *c n d"], statistics: Statistics, *, beta: Any = 1.0, use_var: bool = True, eps: float = 1e-5
) -> Float[Tensor, "b h *c n d"]:
    r"""The query that makes softmax attention Attention-BN: :math:`(q - \beta\mu)/(\sigma^2 + \varepsilon)`."""
    mean, variance = statistics
    centred = q - beta * mean
    return centred * (variance + eps).reciprocal() if use_var else centred
