r"""What a transformer block costs with each attention (spec §6.4): counted, kept for the backward pass, and timed.

With a multiply-add as 2, matrix products only, head size D = d/H, scales r_s, N_s = ⌈N/r_s⌉, feedforward width m·d:

.. math:: F = 8Nd^2 + 4mNd^2 + 4ND\sum_s N_s

Pooling before the projections of keys and values makes :math:`4Nd^2 + 4Dd\sum_s N_s` of the first term.
"""

import math
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dualform.models import Block

RATIO = 2
"""The feedforward network is so many times as wide as a token."""


def block(attention: str, width: int, heads: int, **options: Any) -> nn.Module:
    """A transformer block."""
    return Block(width, heads, RATIO * width, attention=attention, **options)


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


def kept_bytes(layer: nn.Module, forward: Callable[[], Tensor]) -> int:
    """What a forward pass keeps for the backward pass, parameters aside: each storage once."""
    known, found = {id_of(p) for p in layer.parameters()}, {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if id_of(tensor) not in known:
            found[id_of(tensor)] = tensor.untyped_storage().nbytes()
            alive.append(tensor)  # or another tensor may get its address
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(found.values())


def id_of(tensor: Tensor) -> int:
    """Which storage a tensor lies in."""
    return tensor.untyped_storage()._cdata


def unfused() -> AbstractContextManager[Any]:
    """Attention written out: torch's fused kernels are hidden from its counters, and keep no weights."""
    return sdpa_kernel(SDPBackend.MATH)


def work(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    """One forward and backward pass."""

    def once() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    return once


def timed(works: Sequence[Callable[[], Any]], repeats: int, *, warm: bool = True) -> list[list[float]]:
    """Seconds of each, in turns, so that what else the machine does meets them alike. A first turn may warm up."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + warm):
        for each, took in zip(works, times, strict=True):
            begin = time.perf_counter()
            each()
            if turn >= warm:
                took.append(time.perf_counter() - begin)
    return times


def ratios(times: Sequence[Sequence[float]]) -> list[float]:
    """Each against the first: the median over the turns."""
    return [statistics.median(b / a for a, b in zip(times[0], took, strict=True)) for took in times]


def peak_bytes(make: Callable[[], Callable[[], None]]) -> int:
    """How much a process grows at most while it does some work; in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        torch.set_num_threads(1)
        todo = make()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        todo()
        theirs.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)

    process = context.Process(target=child)
    process.start()
    found = ours.recv()
    process.join()
    return found
