r"""Perturbed grouped-query attention (Khan et al. 2024, arXiv 2408.08454): noise that makes heads of a group differ.

.. math:: X - \lambda E,\qquad E = Z\sigma + \mu

Z is noise with mean 0 and standard deviation 1 in each row, drawn once for a batch; μ and σ are those of the rows of X.
The abstract says that the noise is subtracted from attention maps; the released code subtracts it from the outputs of
heads. Both are implemented.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from dualform.arguments import one_of
from dualform.errors import SizeError

from .cache import Cache
from .expansion import Expansion
from .grouped import GroupedQueryAttention
from .masked_attention import Mode, wide
from .pairs import Padding

NoiseTarget = Literal["map", "output"]
Noise = Literal["normal", "uniform"]


class PerturbedAttention(GroupedQueryAttention):
    """PGQA: grouped-query attention with noise of ``scale`` λ on its heads.

    ``target`` "map" perturbs attention weights, row by row, over the keys that a query sees, except its own key in
    self-attention and whenever it is causal. "output" perturbs the output of each head, with all tokens that are not
    padding and their channels as one row; so it cannot be causal while there is noise. ``noise`` is "normal" or
    "uniform" before it is standardised. ``centred`` leaves μ out, so rows of weights keep their sum. ``train_only``
    turns the noise off in evaluation. An option that is None takes the value of ``mode``. "clean" is map, normal, True,
    True: with μ, most of a head's output would be removed in training, and evaluation would compute another function.
    "reference", as released, is output, uniform, False, False, where entry i of the i-th row of a group is 0 before it
    is standardised. ``weights`` and ``expansions`` have no noise, just as they have no dropout; ``step`` raises an
    error while there is noise.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        groups: int | None = None,
        mode: Mode = "clean",
        target: NoiseTarget | None = None,
        noise: Noise | None = None,
        scale: float = 1.0,
        centred: bool | None = None,
        train_only: bool | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width, heads, groups=groups, dropout=dropout, bias=bias)
        clean = one_of("mode", mode, ("clean", "reference")) == "clean"
        if not 0 <= scale < math.inf:
            raise SizeError(f"scale={scale}, the factor of the noise, must be a finite number, 0 or more.")
        self.mode, self.scale = mode, scale
        self.target = one_of("target", target or ("map" if clean else "output"), ("map", "output"))
        self.noise: Noise = one_of("noise", noise or ("normal" if clean else "uniform"), ("normal", "uniform"))
        self.centred = clean if centred is None else centred
        self.train_only = clean if train_only is None else train_only

    def head_outputs(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n d"]:  # fmt: skip
        """The output of each head with noise, before the heads are merged."""
        own = context is None or context is x
        if not self.noisy:
            return super().head_outputs(x, context, padding=padding, causal=causal)
        if self.target == "map":
            expansions = self.expansions(x, context, padding=padding, causal=causal)
            return self.in_order([self._disturbed(expansion, own or causal) for expansion in expansions])
        if causal:
            raise SizeError(
                "noise on outputs depends on the moments of all tokens, so the future would leak: target='output' is "
                "not causal while there is noise. Use target='map', or evaluate with train_only=True."
            )
        outputs = super().head_outputs(x, context, padding=padding, causal=causal)
        rows = wide(outputs).flatten(2).unflatten(1, (self.kv_heads, -1))  # b G s L
        drawn = self._drawn(rows)
        if self.mode == "reference":
            drawn.diagonal(dim1=-2, dim2=-1).zero_()
        kept = ~padding.repeat_interleave(self.size, 1)[:, None, None] if own and padding is not None else None
        noise = noise_like(rows, drawn, kept, self.centred)
        return (rows - self.scale * noise).flatten(1, 2).view_as(outputs).to(outputs.dtype)

    @property
    def noisy(self) -> bool:
        """Whether noise is added in the present mode."""
        return self.scale > 0 and (self.training or not self.train_only)

    def step(self, x: Float[Tensor, "b n D"], cache: Cache | None = None) -> tuple[Float[Tensor, "b n D"], Cache]:
        """A step of causal attention; an error while there is noise."""
        if self.noisy:
            raise SizeError(
                "a step has no noise, but this layer has, so the result would differ from layer(x, causal=True). Call "
                "eval() on a layer with train_only=True."
            )
        return super().step(x, cache)

    def _disturbed(self, expansion: Expansion, own: bool) -> Float[Tensor, "b h n e"]:
        """The outputs of an expansion's heads with noise on their attention weights. Queries are the last tokens."""
        weights = expansion.weights()
        n, m = weights.shape[-2:]
        kept = torch.ones(1, 1, n, m, dtype=torch.bool, device=weights.device)
        if own:
            kept = ~kept.triu(m - n).tril(m - n)
        kept = kept if expansion.hidden is None else kept & ~expansion.hidden
        weights = weights - self.scale * noise_like(weights, self._drawn(weights), kept, self.centred)
        dropped = F.dropout(weights.to(expansion.values.dtype), self.dropout, self.training)
        return dropped @ expansion.values

    def _drawn(self, like: Float[Tensor, "#b *s"]) -> Float[Tensor, "*s"]:
        """One draw for all of a batch."""
        draw = torch.randn if self.noise == "normal" else torch.rand
        return draw(like.shape[1:], dtype=like.dtype, device=like.device)

    def extra_repr(self) -> str:
        """The options of ``GroupedQueryAttention`` and those of the noise."""
        return (
            f"{super().extra_repr()}, target={self.target!r}, noise={self.noise!r}, scale={self.scale}, "
            f"centred={self.centred}, train_only={self.train_only}"
        )


def noise_like(
    x: Float[Tensor, "b *s L"], drawn: Float[Tensor, "*s L"], kept: Bool[Tensor, "#b *#s L"] | None = None,
    centred: bool = False,
) -> Float[Tensor, "b *s L"]:  # fmt: skip
    """Noise whose rows have the mean and the unbiased deviation of the rows of x, and which is 0 where not ``kept``.

    ``centred``: the means are 0 instead. The result is float32 or wider: variances of weights underflow in float16.
    """
    x, drawn = wide(x), wide(drawn)
    kept = torch.ones_like(drawn, dtype=torch.bool) if kept is None else kept
    (mean, deviation), (center, spread) = moments(x, kept), moments(drawn, kept)
    z = (drawn - center) / torch.where(spread > 0, spread, 1.0)
    return (z * deviation + (0.0 if centred else mean)).masked_fill(~kept, 0.0)


def moments(
    x: Float[Tensor, "*s L"], kept: Bool[Tensor, "*_ L"]
) -> tuple[Float[Tensor, "*t 1"], Float[Tensor, "*t 1"]]:
    """Mean and unbiased deviation of each row over the kept entries; the deviation of fewer than two of them is 0."""
    present = kept.to(x.dtype)
    count = present.sum(-1, keepdim=True)
    mean = (x * present).sum(-1, keepdim=True) / count.clamp(min=1)
    variance = ((x - mean).square() * present).sum(-1, keepdim=True) / (count - 1).clamp(min=1)
    least = torch.finfo(x.dtype).tiny
    return mean, torch.where(variance > least, variance.clamp(min=least).sqrt(), 0.0)
