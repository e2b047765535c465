r"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): several query heads share one key/value head.

.. math:: O_h = \mathrm{softmax}(Q_h K_{g(h)}^\top/\sqrt d)\, V_{g(h)}

With G key/value heads for H query heads, keys and values take G/H of the memory. G = H is multi-head attention, G = 1
multi-query attention.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dualform.errors import SizeError

from .allocation import uniform
from .cache import Cache
from .core import exact_ratio, merge_heads, see_that_they_fit, split_heads, whole_number
from .heads import Group, Heads
from .pairs import Padding, Pairs
from .softmax import Softmax
from .windows import Windows


class GroupedQueryAttention(Heads):
    """Attention with ``groups`` key/value heads (None: half of the heads, or the largest divisor below that).

    Runs of H/G query heads share one. It takes the state dict of a layer with a key/value head for each query head as
    it is: those of a run become their mean.
    """

    segments: ClassVar[bool] = True

    def __init__(
        self, width: int, heads: int, *, groups: int | None = None, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__(width, heads, Softmax(), dropout=dropout)
        self.kv_heads = at_most_half(heads) if groups is None else whole_number("groups", groups, 1)
        exact_ratio("heads", heads, "groups", self.kv_heads)
        self.query, self.out = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)
        self.key, self.value = (nn.Linear(width, self.kv_heads * self.size, bias=bias) for _ in range(2))
        self.register_load_state_dict_pre_hook(pool_projections)

    def groups(self, x: Tensor, context: Tensor, padding: Padding, causal: bool) -> Iterator[Group]:
        """All heads together, and the keys and values that they share."""
        q = split_heads(self.query(x), self.heads)
        k, v = (split_heads(each(context), self.kv_heads) for each in (self.key, self.value))
        yield self._group(q, k, v, padding, causal)

    def handed_out(
        self, k: Float[Tensor, "b G m d"], v: Float[Tensor, "b G m d"], padding: Padding, causal: bool
    ) -> tuple[Float[Tensor, "b h m d"], Float[Tensor, "b h m d"]]:
        """Keys and values as the query heads have them: each for a run, or one for each of them."""
        return k, v

    def allocate(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None
    ) -> Int[Tensor, "b G"]:
        """How many query heads each key/value head gets on some inputs: here as many as any other."""
        return uniform(self.heads, self.kv_heads).to(x.device).expand(len(x), -1)

    def step(self, x: Float[Tensor, "b n D"], cache: Cache | None = None) -> tuple[Float[Tensor, "b n D"], Cache]:
        """What causal attention gives the next tokens, one or more, after those of the cache; and the cache with them.

        The cache has the keys and values of the groups alone: G/H of what multi-head attention keeps.
        """
        see_that_they_fit(x, x, None, self.width, True)
        if cache is not None and len(cache.k) != len(x):
            raise SizeError(f"x has a batch of {len(x)}, and the cache one of {len(cache.k)}.")
        q = split_heads(self.query(x), self.heads)
        k, v = (split_heads(each(x), self.kv_heads) for each in (self.key, self.value))
        if cache is not None:
            k, v = torch.cat([cache.k, k], -2), torch.cat([cache.v, v], -2)
        group = self._group(q, k, v, None, True)
        found = self.kernel.outputs(group.q, group.pairs, None, self.dropout if self.training else 0.0)
        return self.out(merge_heads(found)), Cache(k, v)

    def _group(self, q: Tensor, k: Tensor, v: Tensor, padding: Padding, causal: bool) -> Group:
        k, v = self.handed_out(k, v, padding, causal)
        windows, shared = Windows(k.shape[-2]), self.heads // k.shape[1]
        return Group(tuple(range(self.heads)), q, Pairs(k, v, windows, padding, padding, causal, shared=shared))

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
    """Before a state dict is loaded: keys and values of more heads, or fewer, become those of the groups."""
    for part in ("key", "value"):
        for kind in ("weight", "bias"):
            name = f"{prefix}{part}.{kind}"
            rows = state.get(name)
            if rows is not None and len(rows) in (layer.size * n for n in divisors(layer.heads)):
                state[name] = resized(rows, layer.size, layer.kv_heads, layer.heads)


def divisors(number: int) -> list[int]:
    """All of them."""
    return [each for each in range(1, number + 1) if number % each == 0]
