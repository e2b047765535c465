r"""Cost of a transformer block with each attention (spec §6.4): operations, and memory saved for backward.

Only matrix products count, a multiply-add as 2. With head size D = d/H, scales r_s, N_s = ⌈N/r_s⌉ and feedforward
width m·d:

.. math:: F = 8Nd^2 + 4mNd^2 + 4ND\sum_s N_s

Pooling before the projections of keys and values makes :math:`4Nd^2 + 4Dd\sum_s N_s` of the first term.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dualform.models import TransformerBlock
from experiments.measure import kept_bytes, unfused

RATIO = 2
"""Width of the feedforward network, relative to that of a token."""


def block(attention: str, width: int, heads: int, **options: Any) -> nn.Module:
    """A transformer block."""
    return TransformerBlock(width, heads, RATIO * width, attention=attention, **options)


def formula_flops(length: int, width: int, scales: Sequence[int], ratio: int = RATIO, *, prepool: bool = False) -> int:
    """Operations of a forward pass of a block with dense attention."""
    windows = sum(math.ceil(length / scale) for scale in scales)
    size = width // len(scales)
    projections = 4 * length * width**2 + 4 * size * width * windows if prepool else 8 * length * width**2
    return projections + 4 * ratio * length * width**2 + 4 * length * size * windows


def formula_bytes(length: int, width: int, scales: Sequence[int], ratio: int = RATIO) -> float:
    """Bytes saved for the backward pass without a fused kernel, in float32."""
    heads, rho = len(scales), sum(1 / scale for scale in scales) / len(scales)
    return 4 * (length**2 * heads * rho + (8 + 2 * ratio - 2 * (1 - rho)) * length * width)


def counted_flops(make: Callable[[], nn.Module], length: int, width: int) -> int:
    """Operations of all matrix products in a forward pass, counted by torch on fake tensors."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, unfused():
        make()(torch.empty(1, length, width))
    return counter.get_total_flops()


def saved_bytes(make: Callable[[], nn.Module], length: int, width: int, *, fused: bool, fake: bool = True) -> int:
    """Bytes that a forward pass over a sequence saves for backward. ``fake`` uses fake tensors."""
    with FakeTensorMode() if fake else nullcontext():
        layer = make()
        with nullcontext() if fused else unfused():
            return kept_bytes(layer, lambda: layer(torch.zeros(1, length, width)))
