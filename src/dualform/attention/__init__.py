"""Attention layers, one a file, and the table of them."""

from .batchnorm import BatchNormAttention
from .conv import ConvAttention
from .linear import LinearAttention
from .load import load_from
from .scaled import ScaledHeadAttention
from .softmax import SoftmaxAttention
from .table import ATTENTIONS, build

__all__ = [
    "ATTENTIONS",
    "BatchNormAttention",
    "ConvAttention",
    "LinearAttention",
    "ScaledHeadAttention",
    "SoftmaxAttention",
    "build",
    "load_from",
]
