"""Queries against the store: blocked products with fused reductions, and sums that rebuild what was trained."""

from .certify import (
    Agreement,
    agreement,
    certify,
    entries,
    explained_layers,
    initial_part,
    layer_sums,
)
from .coefficients import coefficients
from .dual import dual_forward
from .rebuild import Sum, add_up, dual_output
from .reduce import Best, GroupSums
from .scan import Queries, scan
from .stream import View, Watch, stream

__all__ = [
    "Agreement",
    "Best",
    "GroupSums",
    "Queries",
    "Sum",
    "View",
    "Watch",
    "add_up",
    "agreement",
    "certify",
    "coefficients",
    "dual_forward",
    "dual_output",
    "entries",
    "explained_layers",
    "initial_part",
    "layer_sums",
    "scan",
    "stream",
]
