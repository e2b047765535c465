"""The table of attention layers: a name for each, and one way to build them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from dualform.errors import QueryError

from .batchnorm import BatchNormAttention
from .conv import ConvAttention
from .linear import LinearAttention
from .scaled import ScaledHeadAttention
from .softmax import SoftmaxAttention

ATTENTIONS: dict[str, Callable[..., nn.Module]] = {
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "bn": BatchNormAttention,
    "sh": ScaledHeadAttention,
    "bn+sh": partial(ScaledHeadAttention, normalise=True),
    "conv1d": partial(ConvAttention, axes=1),
    "conv2d": ConvAttention,
    "conv2d+bn": partial(ConvAttention, normalise=True),
}
"""By name. All take (width, heads, **options) and are called with (x, context=None, *, padding=None, causal=False)."""


def build(name: str, width: int, heads: int, **options: Any) -> nn.Module:
    """An attention layer by its name: ``build("bn", 64, 8)``."""
    if name not in ATTENTIONS:
        raise QueryError(f"no attention is called '{name}': there are {list(ATTENTIONS)}.")
    return ATTENTIONS[name](width, heads, **options)
