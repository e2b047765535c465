r"""What a transformer block costs with each attention (spec §6.4): counted, and kept for the backward pass.

With a multiply-add as 2, matrix products only, head size D = d/H, scales r_s, N_s = ⌈N/r_s⌉, feedforward width m·d:

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
"""The feedforward network is so many times as wide as a token."""


def block(attention: str, width: int, heads: int, **options: Any) -> nn.Module:
    """A transformer block."""
    return TransformerBlock(width, heads, RATIO * width, attention=attention, **options)


def formula_flops(length: int, width: int, scales: Sequence[int], ratio: int = RATIO, *, prepool: bool = False) -> int:
    """What one forward pass of a block takes, for dense attention."""
    windows = sum(math.ceil(length / scale) for scale in scales)
    size = width // len(scales)
    projections = 4 * length * width**2 + 4 * size * width * windows if prepool else 8 * length * width**2
    return projections + 4 * ratio * length * width**2 + 4 * length * size * windows


def formula_bytes(length: int, width: int, scales: Sequence[int], ratio: int = RATIO) -> float:
    """What is kept for the backward pass without a fused kernel, in float32."""
    heads, rho = len(scales), sum(1 / scale for scale in scales) / len(scales)
    return 4 * (length**2 * heads * rho + (8 + 2 * ratio - 2 * (1 - rho)) * length * width)


def counted_flops(make: Callable[[], nn.Module], length: int, width: int) -> int:
    """Those of the matrix products that one forward pass makes, as torch counts them. Nothing is computed."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, unfused():
        make()(torch.empty(1, length, width))
    return counter.get_total_flops()


def saved_bytes(make: Callable[[], nn.Module], length: int, width: int, *, fused: bool, fake: bool = True) -> int:
    """What one forward pass over a sequence keeps for the backward pass. ``fake``: nothing is computed."""
    with FakeTensorMode() if fake else nullcontext():
        layer = make()
        with nullcontext() if fused else unfused():
            return kept_bytes(layer, lambda: layer(torch.zeros(1, length, width)))
