"""Heads: what each gives is merged by one last projection. How they weigh what they see is their kernel's affair."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.arguments import exact_ratio
from dualform.errors import SizeError

from .cache import Cache
from .expansion import Expansion
from .masked_attention import merge_heads, see_that_they_fit, split_heads
from .norm import KeyNorm
from .pairs import Padding, Pairs, blanked
from .windows import Windows


@runtime_checkable
class AttentionKernel(Protocol):
    """How queries weigh the keys that they see."""

    def outputs(
        self, q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None, dropout: float
    ) -> Float[Tensor, "b h n e"]:
        """What the heads give, in the fastest way."""
        ...

    def expansion(
        self, heads: tuple[int, ...], q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None
    ) -> Expansion:
        """The same, written out."""
        ...


class HeadGroup(NamedTuple):
    """Heads that see the same pairs: their numbers, their queries, and the pairs."""

    heads: tuple[int, ...]
    q: Float[Tensor, "b h n d"]
    pairs: Pairs


Projected = tuple[Float[Tensor, "b n D"], Float[Tensor, "b m E"], Float[Tensor, "b m E"]]
"""Queries, keys and values of all heads, side by side."""
EarlierTokens = tuple[Float[Tensor, "b _ _"], ...]
"""Of queries, keys and values what the next token is mixed with."""


class Heads(nn.Module):
    """Attention. A member of the family says in ``groups`` what its heads see, and has a kernel.

    ``norm`` normalises queries and keys; ``dropout`` drops attention weights in training.
    """

    out: nn.Linear
    segments: bool = False
    """Whether causal queries may be the end of what is attended to: a segment that follows on what is remembered."""

    def __init__(
        self, width: int, heads: int, kernel: AttentionKernel, *, norm: KeyNorm | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.width, self.heads, self.size = width, heads, exact_ratio("width", width, "heads", heads)
        self.kv_heads = heads
        if not 0 <= dropout < 1:
            raise SizeError(f"dropout={dropout} must lie in [0, 1).")
        if not isinstance(kernel, AttentionKernel):
            raise SizeError(f"kernel={kernel!r} is no kernel: it has to have outputs and an expansion, as Softmax has.")
        self.kernel, self.norm, self.dropout = kernel, norm, dropout
        self.register_load_state_dict_pre_hook(from_timm)

    def forward(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b n D"]:  # fmt: skip
        """Attend from each token of ``x`` to those of ``context`` (None: of ``x`` itself).

        A layer that takes ``segments`` may be causal where ``x`` is the end of a longer context, as in
        ``layer(x, torch.cat([memory, x], 1), causal=True)``.
        """
        return self.out(merge_heads(self.head_outputs(x, context, padding=padding, causal=causal)))

    def head_outputs(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n d"]:  # fmt: skip
        """What each head gives, before the heads are merged."""
        drop = self.dropout if self.training else 0.0
        found = [
            self.kernel.outputs(group.q, group.pairs, self.norm, drop)
            for group in self._blanked(x, context, padding, causal)
        ]
        return self.in_order(found)

    def expansions(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> list[Expansion]:  # fmt: skip
        """The heads as support vector expansions: those that see the same pairs together."""
        return [self.kernel.expansion(*group, self.norm) for group in self._blanked(x, context, padding, causal)]

    def weights(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n m"]:  # fmt: skip
        """How much each token attends to each other one, head by head. A window's weight is shared by its tokens."""
        found = self.expansions(x, context, padding=padding, causal=causal)
        return self.in_order([each.over_tokens() for each in found])

    def step(
        self, x: Float[Tensor, "b n D"], cache: Cache | None = None
    ) -> tuple[Float[Tensor, "b n D"], Cache]:  # fmt: skip
        """What causal attention gives the next tokens, one or more, after those of the cache; and the cache with them.

        ``y, cache = layer.step(x[:, :1])``, then ``layer.step(x[:, 1:2], cache)``, … is ``layer(x, causal=True)``.
        """
        if not self.segments:
            raise SizeError(
                f"a {type(self).__name__} cannot go on from a cache: it takes no segments. Layers whose segments is "
                "True do: softmax, gqa, relative, …"
            )
        see_that_they_fit(x, x, None, self.width, True)
        if cache is not None:
            self._see_that_it_is_mine(cache, len(x))
        projected, before = self.continued(x, () if cache is None else cache.before)
        q, k, v = (split_heads(each, each.shape[-1] // self.size) for each in projected)
        if cache is not None:
            k, v = torch.cat([cache.k, k], -2), torch.cat([cache.v, v], -2)
        mine = self.handed_out(k, v, None, True)
        pairs = Pairs(*mine, Windows(k.shape[-2]), causal=True, shared=self.heads // mine[0].shape[1])
        found = self.kernel.outputs(q, pairs, self.norm, self.dropout if self.training else 0.0)
        return self.out(merge_heads(found)), Cache(k, v, before)

    @property
    def ordered(self) -> bool:
        """Whether it can be causal, as it is built."""
        return True

    def groups(self, x: Tensor, context: Tensor, padding: Padding, causal: bool) -> Iterator[HeadGroup]:
        """Queries, and the pairs that they see. In self-attention ``context`` is ``x`` itself."""
        raise NotImplementedError

    def before_next(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """How many tokens of which width the next one is mixed with, after so many."""
        return ()

    def continued(self, x: Tensor, before: EarlierTokens) -> tuple[Projected, EarlierTokens]:
        """Queries, keys and values of the tokens of a step, and what is to be known for those that follow."""
        raise NotImplementedError

    def handed_out(
        self, k: Float[Tensor, "b G m d"], v: Float[Tensor, "b G m e"], padding: Padding, causal: bool
    ) -> tuple[Float[Tensor, "b h m d"], Float[Tensor, "b h m e"]]:
        """Keys and values as the query heads have them: each for a run of heads, or one for each of them."""
        return k, v

    def in_order(self, parts: list[Tensor]) -> Tensor:
        """What groups of heads give, head by head."""
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def extra_repr(self) -> str:
        """Width, heads and kernel."""
        kernel = type(self.kernel).__name__ if isinstance(self.kernel, nn.Module) else self.kernel
        return f"{self.width}, {self.heads}, kernel={kernel}, dropout={self.dropout}"

    def _see_that_it_is_mine(self, cache: Cache, batch: int) -> None:
        """A cache has keys of as many heads as this layer, and what its convolutions ask for."""
        of, heads, _, size = cache.k.shape
        if of != batch:
            raise SizeError(f"x has a batch of {batch}, and the cache one of {of}.")
        if (heads, size) != (self.kv_heads, self.size):
            raise SizeError(
                f"the cache has keys of {heads} heads with {size} numbers each, and this layer {self.kv_heads} with "
                f"{self.size}: it is of another layer."
            )
        before, mine = [tuple(each.shape[1:]) for each in cache.before], list(self.before_next(len(cache)))
        if before != mine:
            raise SizeError(
                f"the tokens that the cache has before its next token are {before}, and this layer's {mine}: it is of "
                "a layer with other convolutions, or with none."
            )

    def _blanked(self, x: Tensor, context: Tensor | None, padding: Padding, causal: bool) -> Iterator[HeadGroup]:
        """The groups, with tokens that are not there blanked out: whatever they hold changes nothing."""
        other = x if context is None else context
        see_that_they_fit(x, other, padding, self.width, causal, self.segments)
        there = blanked(other, padding)
        if other is x:
            x = there
        elif causal and padding is not None:
            x = blanked(x, padding[:, -x.shape[1] :])
        return self.groups(x, there, padding, causal)


def from_timm(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: names that timm gives the parts of attention become ours, heads in their order."""
    fused, parts = state.pop(f"{prefix}qkv.weight", None), ("query", "key", "value")
    if fused is not None:
        bias = state.pop(f"{prefix}qkv.bias", None)
        state |= {f"{prefix}{part}.weight": rows for part, rows in zip(parts, fused.chunk(3), strict=True)}
        zeros = fused.new_zeros(len(fused)) if bias is None else bias
        for part, rows in zip(parts, zeros.chunk(3), strict=True):
            if bias is not None or has_bias(layer.get_submodule(part)):
                state[f"{prefix}{part}.bias"] = rows
    for kind in ("weight", "bias"):
        if f"{prefix}proj.{kind}" in state:
            state[f"{prefix}out.{kind}"] = state.pop(f"{prefix}proj.{kind}")


def has_bias(projection: nn.Module) -> bool:
    """Whether a projection, or those of the heads of each scale, has one."""
    return any(name.endswith("bias") for name, _ in projection.named_parameters())


class MultiHead(Heads):
    """Heads with one projection each for queries, keys and values, which all see all tokens.

    ``bias`` is for all projections, without ``qk_bias`` for values and the last one alone.
    """

    def __init__(
        self, width: int, heads: int, kernel: AttentionKernel, *, norm: KeyNorm | None = None, dropout: float = 0.0,
        bias: bool = True, qk_bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(width, heads, kernel, norm=norm, dropout=dropout)
        biases = (bias and qk_bias, bias and qk_bias, bias, bias)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=each) for each in biases)

    def groups(self, x: Tensor, context: Tensor, padding: Padding, causal: bool) -> Iterator[HeadGroup]:
        """All heads together."""
        q, k, v = (split_heads(each, self.heads) for each in self.projected(x, context, padding, causal))
        yield HeadGroup(tuple(range(self.heads)), q, Pairs(k, v, Windows(context.shape[1]), padding, padding, causal))

    def projected(self, x: Tensor, context: Tensor, padding: Padding, causal: bool) -> Projected:
        """Queries, keys and values."""
        return self.query(x), self.key(context), self.value(context)

    def continued(self, x: Tensor, before: EarlierTokens) -> tuple[Projected, EarlierTokens]:
        """All heads have keys and values of their own, and nothing else is to be known."""
        return self.projected(x, x, None, True), ()
