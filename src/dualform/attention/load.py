"""Copy weights into a layer from ``nn.MultiheadAttention`` or from another layer of ``dualform.attention``."""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dualform.errors import SizeError

from .allocation import owners
from .dynamic import DynamicAttention
from .grouped import resized
from .heads import Heads, has_bias
from .scaled import ScaledHeadAttention

LayerT = TypeVar("LayerT", bound=nn.Module)


class ProjectionWeights(NamedTuple):
    """The weight and bias of one projection (query, key, value or out), for all heads in order."""

    weight: Tensor
    bias: Tensor | None


@torch.no_grad()
def load_from(layer: LayerT, other: nn.Module) -> LayerT:
    """Copy the projections of ``nn.MultiheadAttention``, or of another attention layer of ours, into a layer.

    Both must have the same width and number of heads. Other parameters of the layer stay as they are.

    If the layer has fewer key/value heads, each becomes the mean of a run of the old ones, which changes the function;
    if it has more, each is repeated, which keeps the function between layers with the same kernel. The key/value heads
    of a ``dgqa`` are first expanded to its query heads by its allocation, and these are pooled; this keeps the function
    if each run has one key/value head, as with one group per head. A ``dgqa`` with the same number of groups takes them
    unchanged, with the allocation and, in the same mode, with cache and passes; its own previous state is reset in any
    case. From or into a ``kdgqa``, where each example has groups of its own, only the weights are the same.
    """
    if not isinstance(layer, Heads):
        raise SizeError(f"a {type(layer).__name__} cannot take weights: give a layer of dualform.attention.")
    theirs = projections(other)
    width, heads = (
        len(theirs["out"].weight),
        other.num_heads if isinstance(other, nn.MultiheadAttention) else other.heads,
    )
    if (layer.width, layer.heads) != (width, heads):
        raise SizeError(
            f"a layer of width {layer.width} with {layer.heads} heads cannot take the weights of a "
            f"{type(other).__name__} of width {width} with {heads} heads."
        )
    for name, (_, bias) in theirs.items():
        if bias is not None and bool(bias.any()) and not has_bias(layer.get_submodule(name)):
            how = "bias=True" if layer.out.bias is None else "qk_bias=True"
            raise SizeError(
                f"the weights of '{name}' have a bias that is not zero, but the layer has none: build it with {how}."
            )
    holds = other if isinstance(other, DynamicAttention) else None
    heir = layer if isinstance(layer, DynamicAttention) and holds and layer.kv_heads == holds.kv_heads else None
    for name, (weight, bias) in theirs.items():
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        target = layer.get_submodule(name)
        if name in ("key", "value"):
            if holds is not None and heir is None:
                owner = owners(holds.allocation, layer.heads)
                weight, bias = (rows.unflatten(0, (-1, layer.size))[owner].flatten(0, 1) for rows in (weight, bias))
            weight, bias = (resized(rows, layer.size, layer.kv_heads, layer.heads) for rows in (weight, bias))
        if isinstance(layer, ScaledHeadAttention) and isinstance(target, nn.ModuleDict):
            weights, biases = layer.split_by_scale(weight), layer.split_by_scale(bias)
            for scale, projection in target.items():
                _fill(projection, weights[scale], biases[scale])
        else:
            _fill(target, weight, bias)
    if isinstance(layer, DynamicAttention):
        layer.reset_allocation()
    if holds is not None and heir is not None:
        for name in ("allocation", "waiting", *(("cache", "passes") if heir.mode == holds.mode else ())):
            heir.get_buffer(name).copy_(holds.get_buffer(name))
    return layer


def projections(layer: nn.Module) -> dict[str, ProjectionWeights]:
    """The query, key, value and output projections of a layer."""
    if isinstance(layer, nn.MultiheadAttention):
        if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
            raise SizeError(
                "this nn.MultiheadAttention has keys and values of another width, or adds some of its own (kdim, vdim, "
                "add_bias_kv, add_zero_attn): no layer of dualform.attention does that."
            )
        biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
        inside = zip(("query", "key", "value"), layer.in_proj_weight.chunk(3), biases, strict=True)
        weights_by_part = {name: ProjectionWeights(weight, bias) for name, weight, bias in inside}
        return weights_by_part | {"out": ProjectionWeights(layer.out_proj.weight, layer.out_proj.bias)}
    if not isinstance(layer, Heads):
        raise SizeError(f"a {type(layer).__name__} is no attention layer whose weights are known here.")
    return {name: _whole(layer, layer.get_submodule(name)) for name in ("query", "key", "value", "out")}


def _whole(layer: Heads, module: nn.Module) -> ProjectionWeights:
    """One projection, or those of the heads of each scale put together."""
    if not isinstance(layer, ScaledHeadAttention) or not isinstance(module, nn.ModuleDict):
        weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
        if not isinstance(weight, Tensor):
            raise SizeError(f"a projection of this layer is a {type(module).__name__}, which has no weight to take.")
        return ProjectionWeights(weight, bias)
    parts = [linear for linear in module.values() if isinstance(linear, nn.Linear)]
    biased = parts[0].bias is not None
    return ProjectionWeights(
        _rows(layer, [linear.weight for linear in parts]), _rows(layer, [p.bias for p in parts]) if biased else None
    )


def _rows(layer: ScaledHeadAttention, parts: list[Tensor]) -> Tensor:
    """Rows of the heads of each scale, as they are head by head."""
    return torch.cat(parts).unflatten(0, (layer.heads, layer.size))[layer.order].flatten(0, 1)


def _fill(module: nn.Module, weight: Tensor, bias: Tensor) -> None:
    if not isinstance(module, nn.Linear):
        raise SizeError(f"a projection of the layer is a {type(module).__name__}: weights are taken by linear layers.")
    module.weight.copy_(weight)
    if module.bias is not None:
        module.bias.copy_(bias)
