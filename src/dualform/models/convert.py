"""Convert models to another attention with the same weights, and ViT state dicts to timm's names."""

import copy
import math
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from dualform.attention import Heads, RelativeSoftmaxKernel, SoftmaxAttention, build, load_from, options_of, projections
from dualform.errors import SizeError

from .segments import SegmentLM, require_segment_attention
from .transformer import TransformerLM
from .vit import ViT, about_tokens

ConvertedModel = TypeVar("ConvertedModel", bound=nn.Module)


@torch.no_grad()
def convert(model: ConvertedModel, attention: str, *, final_norm: bool = True, **options: Any) -> ConvertedModel:
    """A copy of a model with another kind of attention in every attention layer, and the same weights.

    ``convert(vit, "gqa", groups=2)``: if there are fewer key/value heads, each is the mean of a run of the old ones
    (Ainslie et al. 2023, arXiv 2305.13245). Without ``final_norm`` the last LayerNorm is reset, as in the released code
    of Khan et al. (2024). Widths, heads, dropout, biases and frozen parameters stay the same; ``options`` are those of
    the new attention. :func:`~dualform.attention.load_from` says when the model computes the same function.
    """
    if isinstance(model, Heads):
        raise SizeError(
            f"this {type(model).__name__} is an attention layer, not a model: use "
            f"attention.load_from(build({attention!r}, {model.width}, {model.heads}), layer) to convert it."
        )
    converted = copy.deepcopy(model)
    layers = {
        name: module for name, module in converted.named_modules(remove_duplicate=False) if isinstance(module, Heads)
    }
    if not layers:
        raise SizeError(f"this {type(model).__name__} has no attention layer of dualform.attention to replace.")
    token_options, new = _token_options(model, attention), dict[Heads, Heads]()
    for name, old in layers.items():
        if old not in new:
            new[old] = _replacement(old, attention, token_options | options)
            if isinstance(model, SegmentLM):
                _check_conversion(model, attention, old, new[old])
        converted.set_submodule(name, new[old])
    if not final_norm:
        norm = getattr(converted, "norm", None)
        if not isinstance(norm, nn.LayerNorm):
            raise SizeError(f"this {type(model).__name__} has no last LayerNorm called 'norm' to reset.")
        norm.reset_parameters()
    return converted


def _replacement(old: Heads, attention: str, options: dict[str, Any]) -> Heads:
    """A new attention layer with the weights of an old one; the parts frozen there are frozen here too."""
    layer_options = {"dropout": old.dropout, "bias": old.out.bias is not None} | options
    if "qk_bias" in options_of(attention):
        layer_options = {"qk_bias": projections(old)["query"].bias is not None} | layer_options
    new = build(attention, old.width, old.heads, **layer_options).to(old.out.weight).train(old.training)
    assert isinstance(new, Heads)
    old_parameters = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        part = name.split(".")[0]
        like = [p for key, p in old_parameters.items() if key == name] or [
            p for key, p in old_parameters.items() if key.startswith(f"{part}.")
        ]
        parameter.requires_grad_(any(p.requires_grad for p in like or old_parameters.values()))
    return load_from(new, old)


def _check_conversion(model: SegmentLM, attention: str, old: Heads, new: Heads) -> None:
    """Require a new attention that is causal, uses the model's memory and does not lose its positions."""
    require_segment_attention(model, attention, new)
    if (
        not model.positions
        and isinstance(old.kernel, RelativeSoftmaxKernel)
        and not isinstance(new.kernel, RelativeSoftmaxKernel)
    ):
        raise SizeError(
            f"this SegmentLM has no positions except those of its relative attention, and '{attention}' has none. "
            "Convert to 'relative' or 'relative-conv', or train one with positions='sinusoid'."
        )


def _token_options(model: nn.Module, attention: str) -> dict[str, Any]:
    """The options about tokens that a model passes to its attention layers."""
    if isinstance(model, ViT):
        return about_tokens(attention, math.isqrt(model.pos_embed.shape[1] - 1))
    reads_on = isinstance(model, TransformerLM | SegmentLM)
    return {"one_sided": True} if reads_on and attention.startswith("conv1d") else {}


def as_timm(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a ViT with softmax attention under timm's names: a fused ``qkv``, and ``proj`` for ``out``.

    The opposite direction needs no function: our models load state dicts with these names if their attention has the
    same parameters as timm's. Additional ones, such as convolutions and relative positions, stay unchanged with
    ``strict=False``; relative layers have biases of queries and keys if built with ``qk_bias=True``.
    """
    state = dict(model.state_dict())
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Heads)}
    for name, layer in layers.items():
        if type(layer) is not SoftmaxAttention:
            raise SizeError(
                f"'{name}' is a {type(layer).__name__}, but timm only has softmax attention. Use "
                'convert(model, "softmax") first, where that is the same function.'
            )
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{name}.{part}.{kind}", None) for part in ("query", "key", "value", "out")]
            if parts[0] is not None:
                *inside, out = cast(list[Tensor], parts)
                state |= {f"{name}.qkv.{kind}": torch.cat(inside), f"{name}.proj.{kind}": out}
    return state
