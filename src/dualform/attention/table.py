"""The table of attention layers: a name for each, and one way to build them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from dualform.errors import QueryError

from .batchnorm import BatchNormAttention
from .conv import ConvAttention
from .linear import Linear, LinearAttention
from .scaled import ScaledHeadAttention
from .softmax import SoftmaxAttention
from .sparse import Sparse, SparseAttention

PATTERN = ("window", "stride", "stats", "way")


def _sparse(layer: Callable[..., nn.Module], width: int, heads: int, **options: Any) -> nn.Module:
    """A layer on the sparse kernel: options of the pattern are the kernel's, all others the layer's."""
    pattern = {name: options.pop(name) for name in PATTERN if name in options}
    return layer(width, heads, kernel=Sparse(**pattern), **options)


ATTENTIONS: dict[str, Callable[..., nn.Module]] = {
    "softmax": SoftmaxAttention,
    "bn": BatchNormAttention,
    "sh": ScaledHeadAttention,
    "bn+sh": partial(ScaledHeadAttention, normalise=True),
    "linear": LinearAttention,
    "linear-bn": partial(BatchNormAttention, kernel=Linear()),
    "linear-sh": partial(ScaledHeadAttention, kernel=Linear()),
    "linear-bn+sh": partial(ScaledHeadAttention, kernel=Linear(), normalise=True),
    "sparse": SparseAttention,
    "sparse-bn": partial(_sparse, BatchNormAttention),
    "sparse-sh": partial(_sparse, ScaledHeadAttention),
    "sparse-bn+sh": partial(_sparse, partial(ScaledHeadAttention, normalise=True)),
    "conv1d": partial(ConvAttention, axes=1),
    "conv1d+bn": partial(ConvAttention, axes=1, normalise=True),
    "conv2d": ConvAttention,
    "conv2d+bn": partial(ConvAttention, normalise=True),
}
"""By name. All take (width, heads, **options) and are called with (x, context=None, *, padding=None, causal=False)."""


def build(name: str, width: int, heads: int, **options: Any) -> nn.Module:
    """An attention layer by its name: ``build("bn", 64, 8)``."""
    if name not in ATTENTIONS:
        raise QueryError(f"no attention is called '{name}': there are {list(ATTENTIONS)}.")
    return ATTENTIONS[name](width, heads, **options)
