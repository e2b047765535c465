"""The table of attention layers: a name for each, and one way to build them."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from torch import nn

from dualform.errors import UnknownLayer

from .batchnorm import BatchNormAttention
from .conv import ConvAttention
from .dynamic import DynamicAttention
from .grouped import GroupedQueryAttention
from .key_driven import KeyDrivenAttention
from .linear import LinearAttention, LinearKernel
from .perturbed import PerturbedAttention
from .relative import RelativeAttention
from .relative_conv import ConvolvedAttention, RelativeConvAttention
from .scaled import ScaledHeadAttention
from .softmax import SoftmaxAttention
from .sparse import SparseAttention, SparseKernel

PATTERN = tuple(each.name for each in fields(SparseKernel))


def _sparse(layer: Callable[..., nn.Module], width: int, heads: int, **options: Any) -> nn.Module:
    """A layer on the sparse kernel: options of the pattern are the kernel's, all others the layer's."""
    pattern = {name: options.pop(name) for name in PATTERN if name in options}
    return layer(width, heads, kernel=SparseKernel(**pattern), **options)


ATTENTIONS: dict[str, Callable[..., nn.Module]] = {
    "softmax": SoftmaxAttention,
    "bn": BatchNormAttention,
    "sh": ScaledHeadAttention,
    "bn+sh": partial(ScaledHeadAttention, normalise=True),
    "linear": LinearAttention,
    "linear-bn": partial(BatchNormAttention, kernel=LinearKernel()),
    "linear-sh": partial(ScaledHeadAttention, kernel=LinearKernel()),
    "linear-bn+sh": partial(ScaledHeadAttention, kernel=LinearKernel(), normalise=True),
    "sparse": SparseAttention,
    "sparse-bn": partial(_sparse, BatchNormAttention),
    "sparse-sh": partial(_sparse, ScaledHeadAttention),
    "sparse-bn+sh": partial(_sparse, partial(ScaledHeadAttention, normalise=True)),
    "conv1d": partial(ConvAttention, axes=1),
    "conv1d+bn": partial(ConvAttention, axes=1, normalise=True),
    "conv2d": partial(ConvAttention, axes=2),
    "conv2d+bn": partial(ConvAttention, axes=2, normalise=True),
    "gqa": GroupedQueryAttention,
    "kdgqa": KeyDrivenAttention,
    "dgqa": DynamicAttention,
    "pgqa": PerturbedAttention,
    "mdha": ConvolvedAttention,
    "relative": RelativeAttention,
    "relative-conv": RelativeConvAttention,
}
"""By name. All take (width, heads, **options) and are called with (x, context=None, *, padding=None, causal=False)."""


def build(name: str, width: int, heads: int, **options: Any) -> nn.Module:
    """An attention layer by its name: ``build("bn", 64, 8)``."""
    if name not in ATTENTIONS:
        raise UnknownLayer(f"no attention is called '{name}': there are {list(ATTENTIONS)}.")
    known = options_of(name)
    if unknown := [option for option in options if option not in known]:
        raise UnknownLayer(f"the attention '{name}' has no option '{unknown[0]}': it has {known}.")
    return ATTENTIONS[name](width, heads, **options)


def options_of(name: str) -> list[str]:
    """The options that a member of the table takes."""
    layer, given, own = ATTENTIONS[name], set[str](), ()
    while isinstance(layer, partial):
        given |= set(layer.keywords)
        layer, own = (layer.args[0], PATTERN) if layer.func is _sparse else (layer.func, own)
    own = PATTERN if layer is SparseAttention else own
    taken = [each.name for each in inspect.signature(layer).parameters.values() if each.kind is each.KEYWORD_ONLY]
    sized = isinstance(layer, type) and issubclass(layer, ConvAttention | ConvolvedAttention)
    hidden = given | {"normalise", "weigh" if sized else "kernel"}  # of convolutions it is their size
    hidden |= {"beta", "use_var", "eps"} if "normalise" in {*taken} - given else set()
    return [*own, *(option for option in taken if option not in hidden)]
