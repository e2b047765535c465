"""What work costs: kept for the backward pass, timed in turns, and by how much a process grows."""

import ctypes
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel


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


def resident(which: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at most since the peak began anew (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(which))


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
    """How much a process grows at most while it does some work; in a process of its own.

    The work is done once before, on what is made for that alone, so that nothing is counted that a process grows by the
    first time only. Then free memory is given back, and the peak begins anew (Linux alone can do that).
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        torch.set_num_threads(1)
        make()()
        todo = make()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        todo()
        theirs.send(resident("VmHWM") - before)

    process = context.Process(target=child)
    process.start()
    theirs.close()  # so that one hears of it if the process ends without a word
    try:
        return ours.recv()
    except EOFError as error:
        raise RuntimeError("the process whose growth is measured ended early: perhaps memory ran out.") from error
    finally:
        process.join()
