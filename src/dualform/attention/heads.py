"""The base classes of attention layers: heads that a kernel computes and one output projection merges."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.arguments import exact_ratio
from dualform.errors import SizeError

from .cache import Cache
from .expansion import Expansion
from .masked_attention import check_sequences, merge_heads, split_heads
from .norm import KeyNorm
from .pairs import Padding, Pairs, zero_padding
from .windows import Windows


@runtime_checkable
class AttentionKernel(Protocol):
    """The function that turns queries and keys into attention weights."""

    def outputs(
        self, q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None, dropout: float
    ) -> Float[Tensor, "b h n e"]:
        """The outputs of the heads, computed in the fastest way."""
        ...

    def expansion(
        self, heads: tuple[int, ...], q: Float[Tensor, "b h n d"], pairs: Pairs, norm: KeyNorm | None
    ) -> Expansion:
        """The same as an explicit support vector expansion."""
        ...


class HeadGroup(NamedTuple):
    """Heads that see the same key/value pairs: their indices, their queries, and the pairs."""

    heads: tuple[int, ...]
    q: Float[Tensor, "b h n d"]
    pairs: Pairs


Projected = tuple[Float[Tensor, "b n D"], Float[Tensor, "b m E"], Float[Tensor, "b m E"]]
"""Queries, keys and values of all heads, concatenated."""
EarlierTokens = tuple[Float[Tensor, "b _ _"], ...]
"""The earlier inputs of queries, keys and values that a convolution needs for the next token."""


class Heads(nn.Module):
    """The base class of attention layers. A subclass defines in ``groups`` what its heads see, and passes a kernel.

    ``norm`` normalises queries and keys; ``dropout`` is applied to attention weights in training.
    """

    out: nn.Linear
    segments: bool = False
    """Whether causal queries may be the end of a longer context: a segment after remembered tokens."""

    def __init__(
        self, width: int, heads: int, kernel: AttentionKernel, *, norm: KeyNorm | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.width, self.heads, self.size = width, heads, exact_ratio("width", width, "heads", heads)
        self.kv_heads = heads
        if not 0 <= dropout < 1:
            raise SizeError(f"dropout={dropout} must lie in [0, 1).")
        if not isinstance(kernel, AttentionKernel):
            raise SizeError(
                f"kernel={kernel!r} is not a kernel: it needs the methods outputs and expansion, as SoftmaxKernel has."
            )
        self.kernel, self.norm, self.dropout = kernel, norm, dropout
        self.register_load_state_dict_pre_hook(from_timm)

    def forward(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b n D"]:  # fmt: skip
        """Attend from each token of ``x`` to those of ``context`` (None: of ``x`` itself).

        A layer that takes ``segments`` can also be causal if ``x`` is the end of a longer context, as in
        ``layer(x, torch.cat([memory, x], 1), causal=True)``.
        """
        return self.out(merge_heads(self.head_outputs(x, context, padding=padding, causal=causal)))

    def head_outputs(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n d"]:  # fmt: skip
        """The output of each head, before the heads are merged."""
        drop = self.dropout if self.training else 0.0
        outputs = [
            self.kernel.outputs(group.q, group.pairs, self.norm, drop)
            for group in self._padded_groups(x, context, padding, causal)
        ]
        return self.in_order(outputs)

    def expansions(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> list[Expansion]:  # fmt: skip
        """The heads as support vector expansions, one for each group of heads that see the same pairs."""
        return [self.kernel.expansion(*group, self.norm) for group in self._padded_groups(x, context, padding, causal)]

    def weights(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n m"]:  # fmt: skip
        """The attention weights between tokens, head by head. The weight of a window is shared by its tokens."""
        expansions = self.expansions(x, context, padding=padding, causal=causal)
        return self.in_order([expansion.over_tokens() for expansion in expansions])

    def step(
        self, x: Float[Tensor, "b n D"], cache: Cache | None = None
    ) -> tuple[Float[Tensor, "b n D"], Cache]:  # fmt: skip
        """Causal attention for the next tokens, one or more, after those of the cache; also returns the new cache.

        ``y, cache = layer.step(x[:, :1])``, then ``layer.step(x[:, 1:2], cache)``, … is ``layer(x, causal=True)``.
        """
        if not self.segments:
            raise SizeError(
                f"a {type(self).__name__} cannot continue from a cache: it does not take segments. Use a layer whose "
                "segments is True: softmax, gqa, relative, …"
            )
        check_sequences(x, x, None, self.width, True)
        if cache is not None:
            self._check_cache(cache, len(x))
        projected, before = self.continued(x, () if cache is None else cache.before)
        q, k, v = (split_heads(rows, rows.shape[-1] // self.size) for rows in projected)
        if cache is not None:
            k, v = torch.cat([cache.k, k], -2), torch.cat([cache.v, v], -2)
        keys_and_values = self.handed_out(k, v, None, True)
        pairs = Pairs(
            *keys_and_values, Windows(k.shape[-2]), causal=True, shared=self.heads // keys_and_values[0].shape[1]
        )
        output = self.kernel.outputs(q, pairs, self.norm, self.dropout if self.training else 0.0)
        return self.out(merge_heads(output)), Cache(k, v, before)

    @property
    def ordered(self) -> bool:
        """Whether the layer can be causal with its present options."""
        return True

    def groups(self, x: Tensor, context: Tensor, padding: Padding, causal: bool) -> Iterator[HeadGroup]:
        """The groups of heads, with their queries and pairs. In self-attention ``context`` is ``x`` itself."""
        raise NotImplementedError

    def before_next(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """The number and width of the earlier inputs that the next token needs, after ``tokens`` tokens."""
        return ()

    def continued(self, x: Tensor, before: EarlierTokens) -> tuple[Projected, EarlierTokens]:
        """Queries, keys and values of the tokens of a step, and the inputs that the next step needs."""
        raise NotImplementedError

    def handed_out(
        self, k: Float[Tensor, "b G m d"], v: Float[Tensor, "b G m e"], padding: Padding, causal: bool
    ) -> tuple[Float[Tensor, "b h m d"], Float[Tensor, "b h m e"]]:
        """Keys and values for the query heads: one for each head, or one for each run of heads that share it."""
        return k, v

    def in_order(self, parts: list[Tensor]) -> Tensor:
        """Concatenate the results of groups of heads in the order of the heads."""
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def extra_repr(self) -> str:
        """Width, number of heads, kernel and dropout."""
        kernel = type(self.kernel).__name__ if isinstance(self.kernel, nn.Module) else self.kernel
        return f"{self.width}, {self.heads}, kernel={kernel}, dropout={self.dropout}"

    def _check_cache(self, cache: Cache, batch: int) -> None:
        """Require a cache with this layer's batch size, key/value heads and convolution inputs."""
        cached_batch, heads, _, size = cache.k.shape
        if cached_batch != batch:
            raise SizeError(f"x has a batch of {batch}, but the cache has one of {cached_batch}.")
        if (heads, size) != (self.kv_heads, self.size):
            raise SizeError(
                f"the cache has keys of {heads} heads with {size} channels each, but this layer has {self.kv_heads} "
                f"with {self.size}: the cache belongs to another layer."
            )
        before, expected = [tuple(tokens.shape[1:]) for tokens in cache.before], list(self.before_next(len(cache)))
        if before != expected:
            raise SizeError(
                f"the cache keeps earlier inputs of shapes {before}, but this layer needs {expected}: the cache "
                "belongs to a layer with other convolutions, or with none."
            )

    def _padded_groups(self, x: Tensor, context: Tensor | None, padding: Padding, causal: bool) -> Iterator[HeadGroup]:
        """The groups, with padding tokens set to zero, so that their content has no effect."""
        attended = x if context is None else context
        check_sequences(x, attended, padding, self.width, causal, self.segments)
        present = zero_padding(attended, padding)
        if attended is x:
            x = present
        elif causal and padding is not None:
            x = zero_padding(x, padding[:, -x.shape[1] :])
        return self.groups(x, present, padding, causal)


def from_timm(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Pre-hook of ``load_state_dict``: rename timm's attention parameters to ours, and split its fused projection."""
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
    """Whether a projection, or one of its projections per scale, has a bias."""
    return any(name.endswith("bias") for name, _ in projection.named_parameters())


class MultiHead(Heads):
    """Attention with one projection each for queries, keys and values, where all heads see all tokens.

    ``bias`` applies to all projections; with ``qk_bias=False`` only to those of the values and the output.
    """

    def __init__(
        self, width: int, heads: int, kernel: AttentionKernel, *, norm: KeyNorm | None = None, dropout: float = 0.0,
        bias: bool = True, qk_bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(width, heads, kernel, norm=norm, dropout=dropout)
        biases = (bias and qk_bias, bias and qk_bias, bias, bias)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=with_bias) for with_bias in biases)

    def groups(self, x: Tensor, context: Tensor, padding: Padding, causal: bool) -> Iterator[HeadGroup]:
        """All heads as one group."""
        q, k, v = (split_heads(rows, self.heads) for rows in self.projected(x, context, padding, causal))
        yield HeadGroup(tuple(range(self.heads)), q, Pairs(k, v, Windows(context.shape[1]), padding, padding, causal))

    def projected(self, x: Tensor, context: Tensor, padding: Padding, causal: bool) -> Projected:
        """Project tokens to queries, keys and values."""
        return self.query(x), self.key(context), self.value(context)

    def continued(self, x: Tensor, before: EarlierTokens) -> tuple[Projected, EarlierTokens]:
        """Project the new tokens; the next step needs no earlier inputs."""
        return self.projected(x, x, None, True), ()
