"""The heads' inputs from a recorded call: of our layers, of torch's, and of modules that call fused attention."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dualform.attention import Allocating, Expansion, GroupedQueryAttention, Heads, MultiHead, projections, split_heads
from dualform.errors import QueryError

from .head_inputs import HeadInputs, HeadProjection, LayerTokens


@dataclass(frozen=True)
class InnerLinear:
    """A linear layer inside a module, with its input and output in one call."""

    name: str
    module: nn.Module
    input: Float[Tensor, "..."]
    output: Float[Tensor, "..."]

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module is linear, including Hugging Face's ``Conv1D``, which stores its weight transposed."""
        return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"

    @property
    def weight(self) -> Float[Tensor, "o i"]:
        """W in y = W x + b, whichever way the module stores it."""
        weight: Any = self.module.weight
        return weight.detach() if isinstance(self.module, nn.Linear) else weight.detach().mT

    @property
    def bias(self) -> Float[Tensor, " o"] | None:
        """b in y = W x + b."""
        bias: Any = self.module.bias
        return None if bias is None else bias.detach()

    def is_plain(self) -> bool:
        """Whether the output equals W x + b: a subclass or a hook may have added something to it."""
        expected, output = nn.functional.linear(self.input, self.weight, self.bias), self.output
        within = 1e3 * torch.finfo(output.dtype).eps * float(output.abs().max())
        return bool((expected - output).abs().max() <= within)


# ------------------------------------------------------------------------------------------- dualform.attention


def inputs_of_dualform_layer(
    layer: Heads, name: str, arguments: Mapping[str, Any], gradient: Tensor | None
) -> list[HeadInputs]:
    """The inputs of a layer of ``dualform.attention``, from its expansions."""
    x, context, padding = arguments["x"], arguments.get("context"), arguments.get("padding")
    expansions = layer.expansions(x, context, padding=padding, causal=arguments.get("causal", False))
    present = torch.ones(x.shape[:2], dtype=torch.bool)
    if context is None and padding is not None:
        present = ~padding.cpu()
    tokens = None
    own = key_heads(layer)
    if own is not None:
        parts = projections(layer)
        query, key = (
            _head_projection(parts[part], count, _module_path(name, part), heads=layer.heads)
            for part, count in (("query", layer.heads), ("key", own))
        )
        tokens = LayerTokens(_to_float64(x), _to_float64(x if context is None else context), query, key)
    at_heads = None if gradient is None else _to_float64(split_heads(gradient @ layer.out.weight, layer.heads))
    return [_inputs_of_expansion(layer, expansion, present, tokens, at_heads) for expansion in expansions]


def key_heads(layer: Heads) -> int | None:
    """The number of heads of keys, each shared by a run of query heads; None if keys are not a plain projection.

    The runs of key-driven and dynamic groups change, so these layers are reported on in the space of their heads.
    """
    if isinstance(layer, GroupedQueryAttention):
        return None if isinstance(layer, Allocating) else layer.kv_heads
    plain = isinstance(layer, MultiHead) and layer.norm is None and type(layer).projected is MultiHead.projected
    return layer.heads if plain else None


def _inputs_of_expansion(
    layer: Heads,
    expansion: Expansion,
    present: Bool[Tensor, "b n"],
    tokens: LayerTokens | None,
    gradient: Tensor | None,
) -> HeadInputs:
    if expansion.kernel != "exp":
        raise QueryError(
            f"this {type(layer).__name__} has a linear kernel: its weights are not a softmax of logits, so no matrix "
            "separates tokens in it. svm.support_vectors shows which tokens carry it."
        )
    if expansion.keys.ndim > 4:
        raise QueryError(
            f"this {type(layer).__name__} adds terms of its own to its logits (positions): they are not those of one "
            "query-key matrix. svm.support_vectors shows which tokens carry it."
        )
    q, k = _to_float64(expansion.queries), _to_float64(expansion.keys)
    hidden = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    hidden = hidden if expansion.hidden is None else hidden | expansion.hidden.cpu()
    own_gradient = None if gradient is None else gradient[:, list(expansion.heads)]
    return HeadInputs(
        expansion.heads,
        q,
        k,
        1 / math.sqrt(q.shape[-1]),
        hidden,
        present,
        _to_float64(expansion.values),
        tokens,
        own_gradient,
    )


# ------------------------------------------------------------------------------------------- nn.MultiheadAttention


def inputs_of_torch_layer(
    layer: nn.MultiheadAttention, name: str, arguments: Mapping[str, Any], gradient: Tensor | None
) -> list[HeadInputs]:
    """The inputs of ``nn.MultiheadAttention``, whose projections are in one matrix, with the masks of its call."""
    parts, heads = projections(layer), layer.num_heads
    z, x, v = (_batch_first(layer, arguments[part]) for part in ("query", "key", "value"))
    q, k, values = (
        split_heads(nn.functional.linear(tokens, *parts[part]), heads)
        for part, tokens in (("query", z), ("key", x), ("value", v))
    )
    module = _module_path(name, "in_proj")
    query, key = (
        _head_projection(parts[part], heads, module, at) for part, at in (("query", 0), ("key", layer.embed_dim))
    )
    hidden = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    if (padding := arguments.get("key_padding_mask")) is not None:
        hidden = hidden | _hidden_by_mask(layer, padding).reshape(len(z), 1, 1, -1)
    if (mask := arguments.get("attn_mask")) is not None:
        hidden = hidden | _hidden_by_mask(layer, mask).reshape(-1, heads if mask.ndim == 3 else 1, *mask.shape[-2:])
    if gradient is not None:
        gradient = split_heads(_batch_first(layer, gradient) @ layer.out_proj.weight, heads)
    tokens, scale = LayerTokens(_to_float64(z), _to_float64(x), query, key), 1 / math.sqrt(q.shape[-1])
    return [_inputs_of_all_heads(q, k, values, scale, hidden, tokens, gradient, arguments["key"] is arguments["query"])]


def _batch_first(layer: nn.MultiheadAttention, x: Float[Tensor, "..."]) -> Float[Tensor, "b n D"]:
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x if layer.batch_first else x.transpose(0, 1)


# ------------------------------------------------------------------------------------------- the fused kernel


def inputs_of_fused_call(
    layer: nn.Module, arguments: Mapping[str, Any], inside: Sequence[InnerLinear], gradient: Tensor | None
) -> list[HeadInputs]:
    """Queries and keys as they arrived at the kernel, and the linear layers that they are, if nothing came between."""
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    if q.ndim != 4:
        raise QueryError(
            f"{type(layer).__name__} gives torch's attention queries of shape {tuple(q.shape)}: heads are looked for "
            "in (batch, heads, tokens, size)."
        )
    query, key = (_source_projection(rows, inside, q.shape[1]) for rows in (q, k))
    tokens, itself = None, q.shape[2] == k.shape[2]
    if query is not None and key is not None:
        tokens = LayerTokens(_to_float64(query[0]), _to_float64(key[0]), query[1], key[1])
        itself = torch.equal(query[0], key[0])
    k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], 1) for rows in (k, v))
    hidden = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    if (mask := arguments.get("attn_mask")) is not None:
        hidden = hidden | _hidden_by_mask(layer, ~mask if mask.dtype == torch.bool else mask)
    if arguments.get("is_causal", False):
        hidden = hidden | torch.ones(hidden.shape[-2:], dtype=torch.bool).triu(1)
    return [
        _inputs_of_all_heads(
            q, k, v, arguments.get("scale") or 1 / math.sqrt(q.shape[-1]), hidden, tokens, gradient, itself
        )
    ]


def _source_projection(
    rows_by_head: Float[Tensor, "b H n d"], inside: Sequence[InnerLinear], heads: int
) -> tuple[Float[Tensor, "b n D"], HeadProjection] | None:
    """The linear layer, or part of one, whose output is exactly the given queries or keys; and that layer's input.

    Heads that share keys may have had them repeated: then consecutive heads are equal.
    """
    for times in range(rows_by_head.shape[1], 0, -1):
        if rows_by_head.shape[1] % times or not torch.equal(
            rows_by_head[:, ::times].repeat_interleave(times, 1), rows_by_head
        ):
            continue
        rows = rows_by_head[:, ::times].transpose(1, 2).flatten(2)
        for linear in inside:
            if linear.output.ndim != 3 or linear.output.shape[:2] != rows.shape[:2] or not linear.is_plain():
                continue
            for first in range(0, linear.output.shape[-1] - rows.shape[-1] + 1, rows.shape[-1]):
                columns = slice(first, first + rows.shape[-1])
                if torch.equal(linear.output[..., columns], rows):
                    part = linear.weight[columns], None if linear.bias is None else linear.bias[columns]
                    return linear.input, _head_projection(
                        part, rows_by_head.shape[1] // times, linear.name, first, heads
                    )
    return None


# ------------------------------------------------------------------------------------------- shared helpers


def _inputs_of_all_heads(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    scale: float,
    hidden: Tensor,
    tokens: LayerTokens | None,
    gradient: Tensor | None,
    itself: bool,
) -> HeadInputs:
    """The inputs of all heads of a layer. In self-attention (``itself``), tokens that no query sees are padding."""
    present = ~hidden.all(2).all(1) if itself else torch.ones(q.shape[0], q.shape[2], dtype=torch.bool)
    doubles = (_to_float64(q), _to_float64(k))
    head_gradient = None if gradient is None else _to_float64(gradient)
    return HeadInputs(
        tuple(range(q.shape[1])), *doubles, scale, hidden, present, _to_float64(values), tokens, head_gradient
    )


def _head_projection(
    part: tuple[Tensor, Tensor | None], own: int, module: str, first: int = 0, heads: int | None = None
) -> HeadProjection:
    """The rows of a projection, head by head, repeated if it has fewer heads (``own``) than ``heads``."""
    weight, bias = part
    times = (heads or own) // own
    weight = _to_float64(weight).unflatten(0, (own, -1)).repeat_interleave(times, 0)
    if bias is not None:
        bias = _to_float64(bias).unflatten(0, (own, -1)).repeat_interleave(times, 0)
    return HeadProjection(weight, bias, module, first, times)


def _module_path(layer: str, part: str) -> str:
    return f"{layer}.{part}" if layer else part


HIDING_LOGIT = -1e4
"""A mask that adds this or less to a logit hides the token: its weight vanishes."""


def _hidden_by_mask(layer: nn.Module, mask: Tensor) -> Bool[Tensor, "..."]:
    """Which tokens a mask hides: those where it is True or, for an additive mask, at most ``HIDING_LOGIT``."""
    mask = mask.detach().cpu()
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= HIDING_LOGIT
    if bool(mask[~hidden].any()):
        raise QueryError(
            f"{type(layer).__name__} adds terms of its own to its logits (positions, a bias): they are not those of "
            "one query-key matrix."
        )
    return hidden


def _to_float64(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return x.detach().cpu().double()
