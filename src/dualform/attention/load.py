"""Weights of torch's own attention, for ours."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from dualform.errors import SizeError

from .scaled import ScaledHeadAttention

Layer = TypeVar("Layer", bound=nn.Module)


@torch.no_grad()
def load_from(layer: Layer, other: nn.MultiheadAttention) -> Layer:
    """Copy the weights of ``nn.MultiheadAttention`` into an attention layer of the same width and heads."""
    width, heads = getattr(layer, "width", None), getattr(layer, "heads", None)
    if (width, heads) != (other.embed_dim, other.num_heads) or other.in_proj_weight is None:
        raise SizeError(
            f"a layer of width {width} with {heads} heads cannot take the weights of an nn.MultiheadAttention of width "
            f"{other.embed_dim} with {other.num_heads} heads (and keys and values of its own width)."
        )
    weights = other.in_proj_weight.chunk(3)
    biases: tuple[Tensor | None, ...] = (None,) * 3 if other.in_proj_bias is None else other.in_proj_bias.chunk(3)
    for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        _fill(layer.get_submodule(name), weight, bias, layer)
    _fill(layer.get_submodule("out"), other.out_proj.weight, other.out_proj.bias, layer)
    return layer


def _fill(module: nn.Module, weight: Tensor, bias: Tensor | None, layer: nn.Module) -> None:
    """One projection, or those of the heads of each scale in turn."""
    if isinstance(module, nn.ModuleDict):
        assert isinstance(layer, ScaledHeadAttention)
        sizes = [count * layer.size for count in layer.counts.values()]
        parts = zip(weight.split(sizes), [None] * len(sizes) if bias is None else bias.split(sizes), strict=True)
        for each, (some, shift) in zip(module.values(), parts, strict=True):
            _fill(each, some, shift, layer)
        return
    assert isinstance(module, nn.Linear)
    module.weight.copy_(weight)
    if module.bias is not None:
        module.bias.zero_() if bias is None else module.bias.copy_(bias)
    elif bias is not None and bool(bias.any()):
        raise SizeError("the weights have a bias that is not zero, and the layer has none: build it with bias=True.")
