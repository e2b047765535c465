r"""Attention-SH: heads that are fitted with less data (Nguyen et al. 2023, arXiv 2406.13781).

Head s has a scale r and sees ⌈N/r⌉ pooled keys and values; queries, and so the output, keep their length.

.. math:: h_i^s = \sum_m \mathrm{softmax}_m(q_i^\top \bar k_m/\sqrt d)\, \bar v_m,\qquad
    \bar k_m = \text{mean of } k_j \text{ over the window } j \in [mr, (m+1)r)

Pooling commutes with the projections, so tokens are pooled first and fewer of them are projected. Heads of one scale
run together. Which pooling and which scales the paper used was not at hand: both are arguments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dualform.errors import SizeError

from .batchnorm import Statistics, normalised_query, statistics_of
from .core import Heads, Padding, attend, see_that_they_fit, split_heads

Pool = Literal["avg", "stride"]
SCALES = {1: (1,), 2: (1, 2), 3: (1, 2, 4), 4: (1, 2, 4, 8), 8: (1, 1, 2, 2, 4, 4, 8, 8)}
"""Scales for some numbers of heads; others take the first few, over and over again."""


def default_scales(heads: int) -> tuple[int, ...]:
    """A scale for each head, at least one of them 1."""
    return SCALES.get(heads) or tuple(sorted((1, 2, 4, 8)[i % 4] for i in range(heads)))


def pool_tokens(
    x: Float[Tensor, "b m D"], scale: int, padding: Padding = None, pool: Pool = "avg"
) -> tuple[Float[Tensor, "b w D"], Bool[Tensor, "b w"] | None]:
    """Windows of so many tokens, each as the mean of those that are there (or its first one), and which are empty."""
    length = x.shape[1]
    if scale == 1:
        return x, padding
    if pool == "stride":
        return x[:, ::scale], None if padding is None else padding[:, ::scale]
    windows = -(-length // scale)
    there = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device) if padding is None else (~padding).to(x.dtype)
    rest = windows * scale - length
    there = nn.functional.pad(there, (0, rest)).unflatten(1, (windows, scale))
    summed = nn.functional.pad(x, (0, 0, 0, rest)).unflatten(1, (windows, scale))
    count = there.sum(2)
    mean = (summed * there.unsqueeze(-1)).sum(2) / count.clamp(min=1).unsqueeze(-1)
    return mean, None if padding is None else count == 0


@dataclass(frozen=True)
class Windows:
    """What each query of a causal head sees: the windows that are complete by then, and its own token."""

    own_k: Float[Tensor, "b H n d"]
    own_v: Float[Tensor, "b H n d"]
    k: Float[Tensor, "b H w d"]
    v: Float[Tensor, "b H w d"]
    seen: Bool[Tensor, "b n w"]

    def statistics(self) -> Statistics:
        """Mean and variance of the keys that each query sees."""
        seen = self.seen.unsqueeze(1).to(self.k.dtype)
        count = seen.sum(-1, keepdim=True) + 1
        mean = (seen @ self.k + self.own_k) / count
        far = (seen.unsqueeze(-1) * (self.k.unsqueeze(-3) - mean.unsqueeze(-2)).square()).sum(-2)
        return mean, (far + (self.own_k - mean).square()) / count

    def attend(self, q: Float[Tensor, "b H n d"], dropout: float) -> Float[Tensor, "b H n d"]:
        """Softmax attention over them."""
        logits = (q @ self.k.mT).masked_fill(~self.seen.unsqueeze(1), -torch.inf)
        own = (q * self.own_k).sum(-1, keepdim=True)
        weights = (torch.cat([logits, own], -1) / math.sqrt(q.shape[-1])).softmax(-1)
        weights = nn.functional.dropout(weights, dropout, dropout > 0)
        return weights[..., :-1] @ self.v + weights[..., -1:] * self.own_v


def complete_windows(
    k: Float[Tensor, "b H n d"], v: Float[Tensor, "b H n d"], scale: int, padding: Padding, pool: Pool
) -> Windows:
    """The windows of a causal head. One that is cut off at the end is never complete, so nobody sees it."""
    batch, heads, length, _ = k.shape
    hidden = None if padding is None else padding.repeat_interleave(heads, 0)
    pooled = [pool_tokens(each.flatten(0, 1), scale, hidden, pool) for each in (k, v)]
    whole = length // scale
    pooled_k, pooled_v = (each[:, :whole].unflatten(0, (batch, heads)) for each, _ in pooled)
    ends = torch.arange(1, whole + 1, device=k.device) * scale - 1
    seen = (ends <= torch.arange(length, device=k.device).unsqueeze(1)).expand(batch, length, whole)
    empty = pooled[0][1]
    if empty is not None:
        seen = seen & ~empty[::heads, None, :whole]
    return Windows(k, v, pooled_k, pooled_v, seen)


class ScaledHeadAttention(Heads):
    """Attention-SH: no parameter is added, and with all scales 1 it is softmax attention.

    ``normalise`` makes it Attention-BN+SH: the statistics are those of the pooled keys of each head.
    """

    def __init__(
        self, width: int, heads: int, *, scales: Sequence[int] | None = None, pool: Pool = "avg",
        normalise: bool = False, beta: float = 1.0, use_var: bool = True, eps: float = 1e-5, dropout: float = 0.0,
        bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(width, heads, dropout=dropout)
        self.scales = tuple(sorted(default_scales(heads) if scales is None else scales))
        if len(self.scales) != heads or min(self.scales) < 1:
            raise SizeError(f"scales={list(self.scales)} must hold {heads} whole numbers, one a head, 1 or more.")
        if pool not in ("avg", "stride"):
            raise SizeError(f"pool={pool!r} is not known; choose 'avg' or 'stride'.")
        self.pool: Pool = pool
        self.normalise, self.beta, self.use_var, self.eps = normalise, beta, use_var, eps
        self.counts = {scale: self.scales.count(scale) for scale in dict.fromkeys(self.scales)}
        self.query, self.out = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)
        sizes = {str(scale): count * self.size for scale, count in self.counts.items()}
        self.key = nn.ModuleDict({scale: nn.Linear(width, size, bias=bias) for scale, size in sizes.items()})
        self.value = nn.ModuleDict({scale: nn.Linear(width, size, bias=bias) for scale, size in sizes.items()})

    def head_outputs(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n d"]:  # fmt: skip
        """What each head gives, before the heads are merged; heads are in the order of their scales."""
        context = x if context is None else context
        see_that_they_fit(x, context, causal)
        queries = split_heads(self.query(x), self.heads).split(list(self.counts.values()), dim=1)
        found = [
            self._group(q, context, scale, count, padding, causal)
            for q, (scale, count) in zip(queries, self.counts.items(), strict=True)
        ]
        return torch.cat(found, 1)

    def _group(self, q: Tensor, context: Tensor, scale: int, count: int, padding: Padding, causal: bool) -> Tensor:
        """The heads of one scale."""
        pooled = not causal and scale > 1
        tokens, empty = pool_tokens(context, scale, padding, self.pool) if pooled else (context, padding)
        k = split_heads(self.key[str(scale)](tokens), count)
        v = split_heads(self.value[str(scale)](tokens), count)
        options: dict[str, Any] = {"beta": self.beta, "use_var": self.use_var, "eps": self.eps}
        if causal and scale > 1:
            windows = complete_windows(k, v, scale, padding, self.pool)
            if self.normalise:
                q = normalised_query(q, windows.statistics(), **options)
            return windows.attend(q, self.drop)
        if self.normalise:
            q = normalised_query(q, statistics_of(k, empty, causal), **options)
        return attend(q, k, v, padding=empty, causal=causal, dropout=self.drop)
