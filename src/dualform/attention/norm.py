"""Statistics of the keys that a head sees, and batch normalisation by them. Sums are taken in float32 at least."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from .masked_attention import wide
from .pairs import Padding, Pairs

Statistics = tuple[Float[Tensor, "b h *c #n d"], Float[Tensor, "b h *c #n d"]]
"""Mean and (biased) variance of the keys; one for each query where it is causal."""


def statistics_of(pairs: Pairs) -> Statistics:
    """The statistics of all keys or, if causal, of the keys that each query sees."""
    if pairs.own is not None:
        return window_statistics(pairs)
    return (prefix_statistics if pairs.causal else key_statistics)(pairs.k, pairs.empty)


def key_statistics(k: Float[Tensor, "b h m d"], padding: Padding = None) -> Statistics:
    """Mean and variance over the keys that are not padding."""
    k = wide(k)
    if padding is None:
        mean = k.mean(-2, keepdim=True)
        return mean, (k - mean).square().mean(-2, keepdim=True)
    gone = padding[:, None, :, None]
    count = (~gone).to(k.dtype).sum(-2, keepdim=True).clamp(min=1)
    mean = k.masked_fill(gone, 0.0).sum(-2, keepdim=True) / count
    return mean, (k - mean).square().masked_fill(gone, 0.0).sum(-2, keepdim=True) / count


def prefix_statistics(k: Float[Tensor, "b h n d"], padding: Padding = None) -> Statistics:
    """Mean and variance of the keys up to each token, so that no future token has an influence."""
    origin = _first_key(k, padding)
    return _moments(*_running_sums(k, origin, padding), origin)


def window_statistics(pairs: Pairs) -> Statistics:
    """Mean and variance of the keys that each query of a causal head sees: complete windows, and its own."""
    assert pairs.own is not None
    own = pairs.own[0]
    origin = _first_key(own, pairs.padding)
    complete = (torch.arange(own.shape[-2], device=own.device) + 1) // pairs.windows.scale
    sums = (F.pad(sums, (0, 0, 1, 0))[..., complete, :] for sums in _running_sums(pairs.k, origin, pairs.empty))
    centred_own = wide(own) - origin
    count, first, second = (a + b for a, b in zip(sums, (1.0, centred_own, centred_own.square()), strict=True))
    return _moments(count, first, second, origin)


def subset_statistics(k: Float[Tensor, "b h *c m d"], visible: Bool[Tensor, "*s n m"]) -> Statistics:
    """Mean and variance of the keys that each query sees."""
    any_sees = visible.any(-2).unsqueeze(-1)
    k = wide(k)
    with torch.no_grad():
        origin = k.masked_fill(~any_sees, 0.0).sum(-2, keepdim=True) / any_sees.sum(-2, keepdim=True).clamp(min=1)
    present, near = visible.to(k.dtype), k - origin
    with torch.autocast(k.device.type, enabled=False):  # autocast would sum in half precision
        sums, squares = present @ near, present @ near.square()
    return _moments(present.sum(-1, keepdim=True), sums, squares, origin)


def _running_sums(k: Tensor, origin: Tensor, padding: Padding) -> tuple[Tensor, Tensor, Tensor]:
    """Running counts, sums and sums of squares around an origin."""
    near = wide(k) - origin
    present = torch.ones_like(near[:1, :1, :, :1])
    if padding is not None:
        gone = padding[:, None, :, None]
        present, near = (~gone).to(near.dtype), near.masked_fill(gone, 0.0)
    return present.cumsum(-2), near.cumsum(-2), near.square().cumsum(-2)


def _moments(count: Tensor, sums: Tensor, squares: Tensor, origin: Tensor) -> Statistics:
    count = count.clamp(min=1)
    mean = sums / count
    return mean + origin, (squares / count - mean.square()).clamp(min=0)


def _first_key(k: Tensor, padding: Padding) -> Float[Tensor, "b h 1 d"]:
    """A key that is there. Sums are taken around it, so that an offset of all keys costs no precision."""
    k = wide(k).detach()
    if padding is None:
        return k[..., :1, :]
    first = (~padding).int().argmax(-1)
    return torch.take_along_dim(k, first[:, None, None, None], -2)


class KeyNorm(nn.Module):
    """Batch normalisation by the statistics of the keys. ``learnable_beta``: one trained β per head (an extension)."""

    def __init__(self, heads: int, *, beta: float, use_var: bool, eps: float, learnable_beta: bool = False) -> None:
        super().__init__()
        self.use_var, self.eps = use_var, eps
        self.beta: Any = nn.Parameter(torch.full((heads, 1, 1), float(beta))) if learnable_beta else beta

    def forward(self, x: Float[Tensor, "b h *c n d"], statistics: Statistics) -> Float[Tensor, "b h *c n d"]:
        r"""Queries, or keys, as the primal layer has them: :math:`(x - \beta\mu)/\sqrt{\sigma^2 + \varepsilon}`."""
        return normalised(x, statistics, beta=self._beta(x), use_var=self.use_var, eps=self.eps)

    def keys(self, k: Float[Tensor, "b h m d"], statistics: Statistics) -> Float[Tensor, "b h *n m d"]:
        """Normalised keys; if the statistics differ from query to query, each query has keys of its own."""
        if statistics[0].shape[-2] == 1:
            return self(k, statistics)
        mean, variance = (moment.unsqueeze(-2) for moment in statistics)  # b h n 1 d
        k = k.unsqueeze(-3)
        return normalised(k, (mean, variance), beta=self._beta(k), use_var=self.use_var, eps=self.eps)

    def query(self, q: Float[Tensor, "b h *c n d"], statistics: Statistics) -> Float[Tensor, "b h *c n d"]:
        r"""The query that makes softmax attention Attention-BN: :math:`(q - \beta\mu)/(\sigma^2 + \varepsilon)`."""
        return normalised_query(q, statistics, beta=self._beta(q), use_var=self.use_var, eps=self.eps)

    def extra_repr(self) -> str:
        """β, whether the variance is used, and ε."""
        return (
            f"beta={'learned' if isinstance(self.beta, Tensor) else self.beta}, use_var={self.use_var}, eps={self.eps}"
        )

    def _beta(self, x: Tensor) -> Any:
        return self.beta.reshape(-1, *(1,) * (x.ndim - 2)) if isinstance(self.beta, Tensor) else self.beta


def normalised(
    x: Tensor, statistics: tuple[Tensor, Tensor], *, beta: Any = 1.0, use_var: bool = True, eps: float = 1e-5
) -> Tensor:
    """Centre and scale by mean and variance."""
    mean, variance = statistics
    centred = x - beta * mean
    return (centred * (variance + eps).rsqrt() if use_var else centred).to(x.dtype)


def normalised_query(
    q: Float[Tensor, "b h *c n d"], statistics: Statistics, *, beta: Any = 1.0, use_var: bool = True, eps: float = 1e-5
) -> Float[Tensor, "b h *c n d"]:
    r"""The query that makes softmax attention Attention-BN: :math:`(q - \beta\mu)/(\sigma^2 + \varepsilon)`.

    For float16 the result is float32, since 1/ε exceeds the range of float16.
    """
    mean, variance = statistics
    centred = q - beta * mean
    changed = centred * (variance + eps).reciprocal() if use_var else centred
    return changed if q.dtype == torch.float16 else changed.to(q.dtype)
