"""Attention layers, one a file, and the table of them."""

from .batchnorm import BatchNormAttention
from .linear import LinearAttention
from .scaled import ScaledHeadAttention
from .softmax import SoftmaxAttention
from .table import ATTENTIONS, build

__all__ = [
    "ATTENTIONS",
    "BatchNormAttention",
    "LinearAttention",
    "ScaledHeadAttention",
    "SoftmaxAttention",
    "build",
]
