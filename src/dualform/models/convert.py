"""Models of ours with another attention, their weights kept; and the names that timm gives the parts of a ViT."""

import copy
import math
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from dualform.attention import Heads, SoftmaxAttention, build, load_from
from dualform.attention.load import projections
from dualform.attention.table import options_of
from dualform.errors import SizeError

from .transformer import TransformerLM
from .vit import ViT, about_tokens

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def convert(model: Model, attention: str, *, final_norm: bool = True, **options: Any) -> Model:
    """A copy of a model in which every attention layer is another one of the table, with the weights of before.

    ``convert(vit, "gqa", groups=2)``: where key/value heads get fewer, each is the mean of a run of them (Ainslie et
    al. 2023, arXiv 2305.13245). Without ``final_norm`` the last LayerNorm is left as new, as in the released code of
    Khan et al. (2024). Widths, heads, dropout and biases stay; ``options`` are those of the new attention.
    """
    made = copy.deepcopy(model)
    layers = {name: each for name, each in made.named_modules() if isinstance(each, Heads)}
    if not layers:
        raise SizeError(f"this {type(model).__name__} has no attention layer of dualform.attention to put another for.")
    told = _told_by(model, attention)
    for name, old in layers.items():
        given = {"dropout": old.dropout, "bias": old.out.bias is not None} | told | options
        if "qk_bias" in options_of(attention):
            given = {"qk_bias": projections(old)["query"].bias is not None} | given
        new = build(attention, old.width, old.heads, **given).to(old.out.weight).train(old.training)
        made.set_submodule(name, load_from(new, old))
    if not final_norm:
        norm = getattr(made, "norm", None)
        if not isinstance(norm, nn.LayerNorm):
            raise SizeError(f"this {type(model).__name__} has no last LayerNorm called 'norm' to leave as new.")
        norm.reset_parameters()
    return made


def _told_by(model: nn.Module, attention: str) -> dict[str, Any]:
    """What a model tells its attention layers of the tokens."""
    if isinstance(model, ViT):
        return about_tokens(attention, math.isqrt(model.pos_embed.shape[1] - 1))
    return {"one_sided": True} if isinstance(model, TransformerLM) and attention.startswith("conv1d") else {}


def as_timm(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a ViT with softmax attention under the names of timm: ``qkv`` in one, ``out`` as ``proj``.

    The other way needs no function: our models load state dicts with these names as they are, whatever their attention.
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
