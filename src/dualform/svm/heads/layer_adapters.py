"""Sights of the layers that can be seen: our own, torch's, and whatever calls torch's fused attention."""

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
    """A linear layer inside a module, with what it was given and gave."""

    name: str
    module: nn.Module
    given: Float[Tensor, "..."]
    gave: Float[Tensor, "..."]

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether it is one: also that of Hugging Face, which keeps its weights the other way round."""
        return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"

    @property
    def weight(self) -> Float[Tensor, "o i"]:
        """As y = W x has it."""
        weight: Any = self.module.weight
        return weight.detach() if isinstance(self.module, nn.Linear) else weight.detach().mT

    @property
    def bias(self) -> Float[Tensor, " o"] | None:
        """What is added."""
        bias: Any = self.module.bias
        return None if bias is None else bias.detach()

    def is_plain(self) -> bool:
        """Whether it gave W x + b and nothing else: what derives from it, or is hooked to it, may add something."""
        made, gave = nn.functional.linear(self.given, self.weight, self.bias), self.gave
        within = 1e3 * torch.finfo(gave.dtype).eps * float(gave.abs().max())
        return bool((made - gave).abs().max() <= within)


# ------------------------------------------------------------------------------------------- our own


def of_ours(layer: Heads, name: str, given: Mapping[str, Any], gradient: Tensor | None) -> list[HeadInputs]:
    """As the layer itself writes its heads out. Softmax over plain projections is one matrix of the tokens."""
    x, context, padding = given["x"], given.get("context"), given.get("padding")
    found = layer.expansions(x, context, padding=padding, causal=given.get("causal", False))
    asked = torch.ones(x.shape[:2], dtype=torch.bool)
    if context is None and padding is not None:
        asked = ~padding.cpu()
    tokens = None
    own = own_keys(layer)
    if own is not None:
        parts = projections(layer)
        query, key = (
            _of_heads(parts[part], count, _inside(name, part), heads=layer.heads)
            for part, count in (("query", layer.heads), ("key", own))
        )
        tokens = LayerTokens(_double(x), _double(x if context is None else context), query, key)
    at_heads = None if gradient is None else _double(split_heads(gradient @ layer.out.weight, layer.heads))
    return [_of_expansion(layer, each, asked, tokens, at_heads) for each in found]


def own_keys(layer: Heads) -> int | None:
    """How many heads have keys of their own, which the others share in runs; None where keys are no plain projection.

    Of key-driven and dynamic groups the runs change, so these are seen in the space of their heads.
    """
    if isinstance(layer, GroupedQueryAttention):
        return None if isinstance(layer, Allocating) else layer.kv_heads
    plain = isinstance(layer, MultiHead) and layer.norm is None and type(layer).projected is MultiHead.projected
    return layer.heads if plain else None


def _of_expansion(
    layer: Heads, each: Expansion, asked: Bool[Tensor, "b n"], tokens: LayerTokens | None, gradient: Tensor | None
) -> HeadInputs:
    if each.kernel != "exp":
        raise QueryError(
            f"this {type(layer).__name__} has a linear kernel: its weights are no softmax of logits, so no matrix "
            "separates tokens in it. svm.support_vectors says which tokens carry it."
        )
    if each.keys.ndim > 4:
        raise QueryError(
            f"this {type(layer).__name__} adds something of its own to its logits (positions): they are not those of "
            "one query-key matrix. svm.support_vectors says which tokens carry it."
        )
    q, k = _double(each.queries), _double(each.keys)
    hidden = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    hidden = hidden if each.hidden is None else hidden | each.hidden.cpu()
    mine = None if gradient is None else gradient[:, list(each.heads)]
    return HeadInputs(each.heads, q, k, 1 / math.sqrt(q.shape[-1]), hidden, asked, _double(each.values), tokens, mine)


# ------------------------------------------------------------------------------------------- nn.MultiheadAttention


def of_torch(
    layer: nn.MultiheadAttention, name: str, given: Mapping[str, Any], gradient: Tensor | None
) -> list[HeadInputs]:
    """Its projections are in one matrix; masks are what the call was given, True where a token is hidden."""
    parts, heads = projections(layer), layer.num_heads
    z, x, v = (_batch_first(layer, given[part]) for part in ("query", "key", "value"))
    q, k, values = (
        split_heads(nn.functional.linear(each, *parts[part]), heads)
        for part, each in (("query", z), ("key", x), ("value", v))
    )
    module = _inside(name, "in_proj")
    query, key = (_of_heads(parts[part], heads, module, at) for part, at in (("query", 0), ("key", layer.embed_dim)))
    hidden = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    if (padding := given.get("key_padding_mask")) is not None:
        hidden = hidden | _unseen(layer, padding).reshape(len(z), 1, 1, -1)
    if (mask := given.get("attn_mask")) is not None:
        hidden = hidden | _unseen(layer, mask).reshape(-1, heads if mask.ndim == 3 else 1, *mask.shape[-2:])
    if gradient is not None:
        gradient = split_heads(_batch_first(layer, gradient) @ layer.out_proj.weight, heads)
    tokens, scale = LayerTokens(_double(z), _double(x), query, key), 1 / math.sqrt(q.shape[-1])
    return [_sight(q, k, values, scale, hidden, tokens, gradient, given["key"] is given["query"])]


def _batch_first(layer: nn.MultiheadAttention, x: Float[Tensor, "..."]) -> Float[Tensor, "b n D"]:
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x if layer.batch_first else x.transpose(0, 1)


# ------------------------------------------------------------------------------------------- the fused kernel


def of_fused(
    layer: nn.Module, given: Mapping[str, Any], inside: Sequence[InnerLinear], gradient: Tensor | None
) -> list[HeadInputs]:
    """Queries and keys as they arrived at the kernel, and the linear layers that they are, if nothing came between."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    if q.ndim != 4:
        raise QueryError(
            f"{type(layer).__name__} gives torch's attention queries of shape {tuple(q.shape)}: heads are looked for "
            "in (batch, heads, tokens, size)."
        )
    query, key = (_source(each, inside, q.shape[1]) for each in (q, k))
    tokens, itself = None, q.shape[2] == k.shape[2]
    if query is not None and key is not None:
        tokens = LayerTokens(_double(query[0]), _double(key[0]), query[1], key[1])
        itself = torch.equal(query[0], key[0])
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    hidden = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    if (mask := given.get("attn_mask")) is not None:
        hidden = hidden | _unseen(layer, ~mask if mask.dtype == torch.bool else mask)
    if given.get("is_causal", False):
        hidden = hidden | torch.ones(hidden.shape[-2:], dtype=torch.bool).triu(1)
    return [_sight(q, k, v, given.get("scale") or 1 / math.sqrt(q.shape[-1]), hidden, tokens, gradient, itself)]


def _source(
    made: Float[Tensor, "b H n d"], inside: Sequence[InnerLinear], heads: int
) -> tuple[Float[Tensor, "b n D"], HeadProjection] | None:
    """The linear layer, or the part of one, that gave queries or keys just as they are; and what it was given.

    Heads that share keys may have had them repeated: then every so many are the same.
    """
    for times in range(made.shape[1], 0, -1):
        if made.shape[1] % times or not torch.equal(made[:, ::times].repeat_interleave(times, 1), made):
            continue
        rows = made[:, ::times].transpose(1, 2).flatten(2)
        for each in inside:
            if each.gave.ndim != 3 or each.gave.shape[:2] != rows.shape[:2] or not each.is_plain():
                continue
            for first in range(0, each.gave.shape[-1] - rows.shape[-1] + 1, rows.shape[-1]):
                some = slice(first, first + rows.shape[-1])
                if torch.equal(each.gave[..., some], rows):
                    part = each.weight[some], None if each.bias is None else each.bias[some]
                    return each.given, _of_heads(part, made.shape[1] // times, each.name, first, heads)
    return None


# ------------------------------------------------------------------------------------------- what all of them share


def _sight(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    scale: float,
    hidden: Tensor,
    tokens: LayerTokens | None,
    gradient: Tensor | None,
    itself: bool,
) -> HeadInputs:
    """All heads of a layer together. Where a sequence attends to ``itself``, a token that nobody sees does not ask."""
    asked = ~hidden.all(2).all(1) if itself else torch.ones(q.shape[0], q.shape[2], dtype=torch.bool)
    doubles = (_double(q), _double(k))
    mine = None if gradient is None else _double(gradient)
    return HeadInputs(tuple(range(q.shape[1])), *doubles, scale, hidden, asked, _double(values), tokens, mine)


def _of_heads(
    part: tuple[Tensor, Tensor | None], own: int, module: str, first: int = 0, heads: int | None = None
) -> HeadProjection:
    """Rows of a projection, head by head. Where it has fewer of its ``own`` than there are ``heads``, they share it."""
    weight, bias = part
    times = (heads or own) // own
    weight = _double(weight).unflatten(0, (own, -1)).repeat_interleave(times, 0)
    if bias is not None:
        bias = _double(bias).unflatten(0, (own, -1)).repeat_interleave(times, 0)
    return HeadProjection(weight, bias, module, first, times)


def _inside(layer: str, part: str) -> str:
    return f"{layer}.{part}" if layer else part


NOTHING = -1e4
"""What is added to a logit so that its weight is nothing."""


def _unseen(layer: nn.Module, mask: Tensor) -> Bool[Tensor, "..."]:
    """Which tokens a mask hides: where it is True or, where it is added to the logits, −∞ or far below all else."""
    mask = mask.detach().cpu()
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= NOTHING
    if bool(mask[~hidden].any()):
        raise QueryError(
            f"{type(layer).__name__} adds something of its own to its logits (positions, a bias): they are not those "
            "of one query-key matrix."
        )
    return hidden


def _double(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return x.detach().cpu().double()
