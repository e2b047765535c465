"""Attention layers, one a file, and the table of them."""

from .allocating import Allocating
from .batchnorm import BatchNormAttention
from .cache import Cache
from .conv import ConvAttention
from .dynamic import DynamicAttention
from .expansion import Expansion
from .grouped import GroupedQueryAttention
from .heads import Heads
from .history import Allocations, allocations
from .key_driven import KeyDrivenAttention
from .linear import LinearAttention
from .load import load_from
from .perturbed import PerturbedAttention
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
    "Allocating",
    "Allocations",
    "BatchNormAttention",
    "Cache",
    "ConvAttention",
    "ConvolvedAttention",
    "DynamicAttention",
    "Expansion",
    "GroupedQueryAttention",
    "Heads",
    "KeyDrivenAttention",
    "LinearAttention",
    "PerturbedAttention",
    "PrimalAttention",
    "RelativeAttention",
    "RelativeConvAttention",
    "ScaledHeadAttention",
    "SoftmaxAttention",
    "SparseAttention",
    "allocations",
    "build",
    "default_scales",
    "from_primal",
    "keep_rate",
    "load_from",
]
