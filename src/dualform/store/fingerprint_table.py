"""Fingerprints of the state after each step: a few entries of a parameter, and checksums of all weights."""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
import xxhash
from torch import Tensor

from .byte_stretch import ByteStretch
from .format import EntrySample
from .store import Store

COUNT, RUN = 16, 8
"""The number of entries that are sampled of a parameter, and how many neighbouring ones form a run."""

GRADIENTS = 2
"""How many gradients are read to find out by what all of them were scaled."""

WHOLE, TURNS = 1 << 18, 8
"""Weights of up to so many bytes are read after every step, others in so many turns …"""

SMALL, LINE = 1 << 15, 64
"""… a weight of up to so many bytes in one of them. Parts begin on a cache line."""


def sampled_entries(tensor: Tensor) -> EntrySample:
    """Which entries of a tensor are sampled: they depend only on its size and precision."""
    return _sampled_entries(tensor.numel(), tensor.dtype)


@lru_cache(maxsize=1 << 12)
def _sampled_entries(size: int, dtype: torch.dtype) -> EntrySample:
    if size <= COUNT:
        return EntrySample([0], size, dtype)
    begins = np.random.default_rng(size).choice(size // RUN, COUNT // RUN, replace=False) * RUN
    return EntrySample(np.sort(begins).tolist(), RUN, dtype)


def entry_sample(tensors: Iterable[Tensor]) -> bytes:
    """The sampled entries of several tensors, concatenated."""
    return b"".join([sampled_entries(tensor).of(tensor) for tensor in tensors])


class WeightsChecksum:
    """A checksum of several weights after each step. Of more than ``WHOLE`` bytes it reads an eighth, a different one
    after each step: a network that has gone another way differs everywhere, and a single changed bit is read within
    eight steps.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self._turns = TURNS if sum(map(_bytes_of, weights)) > WHOLE else 1
        self._stretches: dict[int, list[ByteStretch]] = {}

    def after(self, step: int) -> int:
        """The checksum after a step, as a signed number of 64 bits."""
        turn = step % self._turns
        stretches = self._stretches.get(turn)
        if stretches is None:
            stretches = self._stretches[turn] = self._read_in(turn)
        digests = b"".join([stretch.checksum().to_bytes(8, "little") for stretch in stretches])
        return int.from_bytes(xxhash.xxh3_64_digest(digests), "big", signed=True)

    def _read_in(self, turn: int) -> list[ByteStretch]:
        """What is read in a turn: a part of every large weight, and some of the small ones as a whole."""
        stretches = []
        for number, weight in enumerate(self.weights):
            if self._turns == 1 or _bytes_of(weight) <= SMALL:
                stretches += [ByteStretch(weight)] if number % self._turns == turn else []
            else:
                size = -(-_bytes_of(weight) // (self._turns * LINE)) * LINE
                stretches.append(ByteStretch(weight, turn * size, size))
        return stretches


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def gradient_norm(parameters: Sequence[Tensor]) -> float:
    """The norm of the sampled entries of the last few gradients that are not zero there: by what all gradients were
    scaled or clipped can be read from it.
    """
    norms: list[float] = []
    for parameter in reversed(parameters):
        gradient = parameter.grad
        norm = 0.0 if gradient is None else sampled_entries(gradient).norm_of(gradient)
        if norm != 0:
            norms.append(norm)
            if len(norms) == GRADIENTS:
                break
    return math.hypot(*norms)


def entry_samples_at(store: Store, name: str, step: int) -> tuple[bytes, bytes]:
    """The samples of a parameter and of its optimiser state, as the memory stored them for a step."""
    stored = store.sample(name, step)
    if stored is not None:
        return stored
    return entry_sample([store.initial(name)]), entry_sample(store.initial_states(name).values())
