"""The table of attention layers by name, and the function that builds them."""

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

PATTERN = tuple(field.name for field in fields(SparseKernel))


def _sparse(layer: Callable[..., nn.Module], width: int, heads: int, **options: Any) -> nn.Module:
    """Build a layer with a sparse kernel: options of the pattern go to the kernel, all others to the layer."""
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
"""All attention layers by name.

They take (width, heads, **options), and their forward (x, context=None, *, padding=None, causal=False).
"""


def build(name: str, width: int, heads: int, **options: Any) -> nn.Module:
    """Build an attention layer by its name: ``build("bn", 64, 8)``."""
    if name not in ATTENTIONS:
        raise UnknownLayer(f"no attention is called '{name}': there are {list(ATTENTIONS)}.")
    options_taken = options_of(name)
    if unknown := [option for option in options if option not in options_taken]:
        raise UnknownLayer(f"the attention '{name}' has no option '{unknown[0]}': it has {options_taken}.")
    return ATTENTIONS[name](width, heads, **options)


def options_of(name: str) -> list[str]:
    """The options that a member of the table takes."""
    layer, preset, own = ATTENTIONS[name], set[str](), ()
    while isinstance(layer, partial):
        preset |= set(layer.keywords)
        layer, own = (layer.args[0], PATTERN) if layer.func is _sparse else (layer.func, own)
    own = PATTERN if layer is SparseAttention else own
    keywords = [
        parameter.name
        for parameter in inspect.signature(layer).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    sized = isinstance(layer, type) and issubclass(layer, ConvAttention | ConvolvedAttention)
    hidden = preset | {"normalise", "weigh" if sized else "kernel"}  # of convolutions it is their size
    hidden |= {"beta", "use_var", "eps"} if "normalise" in {*keywords} - preset else set()
    return [*own, *(option for option in keywords if option not in hidden)]
