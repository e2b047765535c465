r"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): several query heads share one key/value head.

.. math:: O_h = \mathrm{softmax}(Q_h K_{g(h)}^\top/\sqrt d)\, V_{g(h)}

With G key/value heads for H query heads, keys and values take G/H of the memory. G = H is multi-head attention, G = 1
multi-query attention.
"""

from collections.abc import Iterator
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from dualform.arguments import exact_ratio, whole_number

from .allocation import uniform
from .heads import EarlierTokens, HeadGroup, Heads, Projected
from .masked_attention import split_heads
from .pairs import Padding, Pairs
from .softmax import SoftmaxKernel
from .windows import Windows


class GroupedQueryAttention(Heads):
    """Attention with ``groups`` key/value heads (None: half of the heads, or the largest divisor below that).

    Runs of H/G query heads share one. A state dict of a layer with one key/value head per query head can be loaded:
    those of a run are averaged.
    """

    segments: bool = True

    def __init__(
        self, width: int, heads: int, *, groups: int | None = None, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__(width, heads, SoftmaxKernel(), dropout=dropout)
        self.kv_heads = at_most_half(heads) if groups is None else whole_number("groups", groups, 1)
        exact_ratio("heads", heads, "groups", self.kv_heads)
        self.query, self.out = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)
        self.key, self.value = (nn.Linear(width, self.kv_heads * self.size, bias=bias) for _ in range(2))
        self.register_load_state_dict_pre_hook(pool_projections)

    def groups(self, x: Tensor, context: Tensor, padding: Padding, causal: bool) -> Iterator[HeadGroup]:
        """All heads as one group, with the keys and values that they share."""
        q = split_heads(self.query(x), self.heads)
        k, v = (split_heads(projection(context), self.kv_heads) for projection in (self.key, self.value))
        k, v = self.handed_out(k, v, padding, causal)
        windows, shared = Windows(context.shape[1]), self.heads // k.shape[1]
        yield HeadGroup(tuple(range(self.heads)), q, Pairs(k, v, windows, padding, padding, causal, shared=shared))

    def continued(self, x: Tensor, before: EarlierTokens) -> tuple[Projected, EarlierTokens]:
        """Keys and values of the groups only: the cache has G/H times the size of a multi-head one."""
        return (self.query(x), self.key(x), self.value(x)), ()

    def allocate(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None
    ) -> Int[Tensor, "b G"]:
        """The number of query heads of each key/value head on given inputs: here the same for all."""
        return uniform(self.heads, self.kv_heads).to(x.device).expand(len(x), -1)

    def extra_repr(self) -> str:
        """The options of ``Heads`` and the number of groups."""
        return f"{super().extra_repr()}, groups={self.kv_heads}"


def at_most_half(heads: int) -> int:
    """The largest divisor of ``heads`` that is at most half of it."""
    return next((groups for groups in range(heads // 2, 0, -1) if heads % groups == 0), 1)


def resized(rows: Float[Tensor, "r ..."], size: int, groups: int, heads: int) -> Float[Tensor, "s ..."]:
    """Resize a projection to ``groups`` key/value heads: each is the mean of a run of the old heads, or a copy of one.

    Each head has ``size`` consecutive rows.
    """
    by_head = rows.unflatten(0, (-1, size))
    if len(by_head) % groups and groups % len(by_head):
        by_head = by_head.repeat_interleave(heads // len(by_head), 0)
    if len(by_head) < groups:
        return by_head.repeat_interleave(groups // len(by_head), 0).flatten(0, 1)
    return by_head.unflatten(0, (groups, -1)).mean(1).flatten(0, 1)


def pool_projections(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Pre-hook of ``load_state_dict``: resize keys and values of more or fewer heads to the number of groups.

    The number of rows does not tell the size of a head, so this layer's size is assumed. Weights of a layer of the same
    width with more or fewer query heads are therefore split wrongly, without an error.
    """
    for part in ("key", "value"):
        for kind in ("weight", "bias"):
            name = f"{prefix}{part}.{kind}"
            rows = state.get(name)
            if rows is not None and len(rows) in (layer.size * n for n in divisors(layer.heads)):
                state[name] = resized(rows, layer.size, layer.kv_heads, layer.heads)


def divisors(number: int) -> list[int]:
    """All divisors of a number, in rising order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
