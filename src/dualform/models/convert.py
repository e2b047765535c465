"""Models of ours with another attention, their weights kept; and the names that timm gives the parts of a ViT."""

import copy
import math
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from dualform.attention import Heads, RelativeSoftmaxKernel, SoftmaxAttention, build, load_from, options_of, projections
from dualform.errors import SizeError

from .segments import SegmentLM, see_that_it_reads_on
from .transformer import TransformerLM
from .vit import ViT, about_tokens

ConvertedModel = TypeVar("ConvertedModel", bound=nn.Module)


@torch.no_grad()
def convert(model: ConvertedModel, attention: str, *, final_norm: bool = True, **options: Any) -> ConvertedModel:
    """A copy of a model in which every attention layer is another one of the table, with the weights of before.

    ``convert(vit, "gqa", groups=2)``: where key/value heads get fewer, each is the mean of a run of them (Ainslie et
    al. 2023, arXiv 2305.13245). Without ``final_norm`` the last LayerNorm is left as new, as in the released code of
    Khan et al. (2024). Widths, heads, dropout, biases and what is frozen stay; ``options`` are those of the new
    attention. It is the same function where :func:`~dualform.attention.load_from` says so.
    """
    if isinstance(model, Heads):
        raise SizeError(
            f"this {type(model).__name__} is an attention layer itself, and no model: "
            f"attention.load_from(build({attention!r}, {model.width}, {model.heads}), layer) makes another of it."
        )
    made = copy.deepcopy(model)
    layers = {name: each for name, each in made.named_modules(remove_duplicate=False) if isinstance(each, Heads)}
    if not layers:
        raise SizeError(f"this {type(model).__name__} has no attention layer of dualform.attention to put another for.")
    told, new = _told_by(model, attention), dict[Heads, Heads]()
    for name, old in layers.items():
        if old not in new:
            new[old] = _instead(old, attention, told | options)
            if isinstance(model, SegmentLM):
                _see_that_it_fits(model, attention, old, new[old])
        made.set_submodule(name, new[old])
    if not final_norm:
        norm = getattr(made, "norm", None)
        if not isinstance(norm, nn.LayerNorm):
            raise SizeError(f"this {type(model).__name__} has no last LayerNorm called 'norm' to leave as new.")
        norm.reset_parameters()
    return made


def _instead(old: Heads, attention: str, options: dict[str, Any]) -> Heads:
    """Another layer with the weights of one, and frozen as it is."""
    given = {"dropout": old.dropout, "bias": old.out.bias is not None} | options
    if "qk_bias" in options_of(attention):
        given = {"qk_bias": projections(old)["query"].bias is not None} | given
    new = build(attention, old.width, old.heads, **given).to(old.out.weight).train(old.training)
    assert isinstance(new, Heads)
    mine = dict(old.named_parameters())
    for name, each in new.named_parameters():
        part = name.split(".")[0]
        like = [p for key, p in mine.items() if key == name] or [
            p for key, p in mine.items() if key.startswith(f"{part}.")
        ]
        each.requires_grad_(any(p.requires_grad for p in like or mine.values()))
    return load_from(new, old)


def _see_that_it_fits(model: SegmentLM, attention: str, old: Heads, new: Heads) -> None:
    """A language model has a memory, and an order, which its new attention must see."""
    see_that_it_reads_on(model, attention, new)
    if (
        not model.positions
        and isinstance(old.kernel, RelativeSoftmaxKernel)
        and not isinstance(new.kernel, RelativeSoftmaxKernel)
    ):
        raise SizeError(
            f"this SegmentLM has no positions but those of its relative attention, and '{attention}' has none. Convert "
            "to 'relative' or 'relative-conv', or train one with positions='sinusoid'."
        )


def _told_by(model: nn.Module, attention: str) -> dict[str, Any]:
    """What a model tells its attention layers of the tokens."""
    if isinstance(model, ViT):
        return about_tokens(attention, math.isqrt(model.pos_embed.shape[1] - 1))
    reads_on = isinstance(model, TransformerLM | SegmentLM)
    return {"one_sided": True} if reads_on and attention.startswith("conv1d") else {}


def as_timm(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a ViT with softmax attention under the names of timm: ``qkv`` in one, ``out`` as ``proj``.

    The other way needs no function: our models load state dicts with these names as they are, where their attention has
    the parameters of timm's and no others. Convolutions and relative positions are others, which stay as they are with
    ``strict=False``; relative layers have a place for biases of queries and keys if built with ``qk_bias=True``.
    """
    state = dict(model.state_dict())
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Heads)}
    for name, layer in layers.items():
        if type(layer) is not SoftmaxAttention:
            raise SizeError(
                f"'{name}' is a {type(layer).__name__}, and timm knows softmax attention alone. "
                'convert(model, "softmax") makes one of it, where that is the same function.'
            )
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{name}.{part}.{kind}", None) for part in ("query", "key", "value", "out")]
            if parts[0] is not None:
                *inside, out = cast(list[Tensor], parts)
                state |= {f"{name}.qkv.{kind}": torch.cat(inside), f"{name}.proj.{kind}": out}
    return state
