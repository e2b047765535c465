"""Attention layers, one a file, and the table of them."""

from .batchnorm import BatchNormAttention
from .cache import Cache
from .conv import ConvAttention
from .expansion import Expansion
from .heads import Heads
from .linear import LinearAttention
from .load import load_from
from .primal import PrimalAttention, from_primal
from .relative import RelativeAttention
from .relative_conv import ConvolvedAttention, RelativeConvAttention
from .scaled import ScaledHeadAttention
from .softmax import SoftmaxAttention
from .sparse import SparseAttention
from .table import ATTENTIONS, build
from .windows import default_scales, keep_rate

__all__ = [
    "ATTENTIONS",
    "BatchNormAttention",
    "Cache",
    "ConvAttention",
    "ConvolvedAttention",
    "Expansion",
    "Heads",
    "LinearAttention",
    "PrimalAttention",
    "RelativeAttention",
    "RelativeConvAttention",
    "ScaledHeadAttention",
    "SoftmaxAttention",
    "SparseAttention",
    "build",
    "default_scales",
    "from_primal",
    "keep_rate",
    "load_from",
]
