"""Attention layers, one a file, and the table of them."""

from .allocating import Allocating
from .batchnorm import BatchNormAttention
from .cache import Cache
from .conv import ConvAttention
from .dynamic import DynamicAttention
from .expansion import Expansion, KernelName, feature_map
from .grouped import GroupedQueryAttention
from .heads import Heads, MultiHead
from .history import Allocations, allocations
from .key_driven import KeyDrivenAttention
from .linear import LinearAttention
from .load import load_from, projections
from .masked_attention import split_heads, wide
from .pairs import Padding
from .perturbed import PerturbedAttention
from .positions import TablePositions, sinusoids
from .primal import PrimalAttention, from_primal
from .relative import RelativeAttention, RelativeSoftmaxKernel
from .relative_conv import ConvolvedAttention, RelativeConvAttention
from .scaled import ScaledHeadAttention
from .softmax import SoftmaxAttention
from .sparse import SparseAttention, SparseKernel
from .table import ATTENTIONS, build, options_of
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
    "KernelName",
    "KeyDrivenAttention",
    "LinearAttention",
    "MultiHead",
    "Padding",
    "PerturbedAttention",
    "PrimalAttention",
    "RelativeAttention",
    "RelativeConvAttention",
    "RelativeSoftmaxKernel",
    "ScaledHeadAttention",
    "SoftmaxAttention",
    "SparseAttention",
    "SparseKernel",
    "TablePositions",
    "allocations",
    "build",
    "default_scales",
    "feature_map",
    "from_primal",
    "keep_rate",
    "load_from",
    "options_of",
    "projections",
    "sinusoids",
    "split_heads",
    "wide",
]
