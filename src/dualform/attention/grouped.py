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

    Runs of H/G query heads share one. It takes the state dict of a layer with a key/value head for each query head as
    it is: those of a run become their mean.
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
        """All heads together, and the keys and values that they share."""
        q = split_heads(self.query(x), self.heads)
        k, v = (split_heads(each(context), self.kv_heads) for each in (self.key, self.value))
        k, v = self.handed_out(k, v, padding, causal)
        windows, shared = Windows(context.shape[1]), self.heads // k.shape[1]
        yield HeadGroup(tuple(range(self.heads)), q, Pairs(k, v, windows, padding, padding, causal, shared=shared))

    def continued(self, x: Tensor, before: EarlierTokens) -> tuple[Projected, EarlierTokens]:
        """Keys and values of the groups alone: a cache takes G/H of what multi-head attention keeps."""
        return (self.query(x), self.key(x), self.value(x)), ()

    def allocate(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None
    ) -> Int[Tensor, "b G"]:
        """How many query heads each key/value head gets on some inputs: here as many as any other."""
        return uniform(self.heads, self.kv_heads).to(x.device).expand(len(x), -1)

    def extra_repr(self) -> str:
        """Also the groups."""
        return f"{super().extra_repr()}, groups={self.kv_heads}"


def at_most_half(heads: int) -> int:
    """The largest divisor of so many heads that is not above their half."""
    return next((groups for groups in range(heads // 2, 0, -1) if heads % groups == 0), 1)


def resized(rows: Float[Tensor, "r ..."], size: int, groups: int, heads: int) -> Float[Tensor, "s ..."]:
    """Rows of a projection for so many key/value heads: each is the mean of a run of those there were, or one of them.

    Rows are heads of ``size`` rows each, one after the other.
    """
    found = rows.unflatten(0, (-1, size))
    if len(found) % groups and groups % len(found):
        found = found.repeat_interleave(heads // len(found), 0)
    if len(found) < groups:
        return found.repeat_interleave(groups // len(found), 0).flatten(0, 1)
    return found.unflatten(0, (groups, -1)).mean(1).flatten(0, 1)


def pool_projections(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: keys and values of more heads, or fewer, become those of the groups.

    Rows do not tell how large heads are: they are taken to be of this layer's size, as in a layer with as many heads.
    Where a layer of the same width has more or fewer heads, its rows are cut wrongly, and nothing shows it.
    """
    for part in ("key", "value"):
        for kind in ("weight", "bias"):
            name = f"{prefix}{part}.{kind}"
            rows = state.get(name)
            if rows is not None and len(rows) in (layer.size * n for n in divisors(layer.heads)):
                state[name] = resized(rows, layer.size, layer.kv_heads, layer.heads)


def divisors(number: int) -> list[int]:
    """All of them."""
    return [each for each in range(1, number + 1) if number % each == 0]
