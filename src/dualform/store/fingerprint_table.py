"""A few entries of every recorded parameter, stored after each step: a fingerprint of the state, bit for bit."""

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
import xxhash
from torch import Tensor

from .format import EntrySample
from .store import Store

COUNT, RUN = 16, 8
"""The number of entries that are sampled of a parameter, and how many neighbouring ones form a run."""


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


def weights_checksum(weights: Iterable[Tensor]) -> int:
    """A checksum of the sampled entries of several tensors, as a signed number of 64 bits."""
    return int.from_bytes(xxhash.xxh3_64_digest(entry_sample(weights)), "big", signed=True)


def gradient_norm(gradients: Iterable[Tensor | None]) -> float:
    """The norm of the sampled entries of gradients: by what they were scaled or clipped can be read from it."""
    samples = ((sampled_entries(gradient), gradient) for gradient in gradients if gradient is not None)
    return math.sqrt(math.fsum(sample.square(sample.of(gradient)) for sample, gradient in samples))


def entry_samples_at(store: Store, name: str, step: int) -> tuple[bytes, bytes]:
    """The samples of a parameter and of its optimiser state, as the memory stored them for a step."""
    stored = store.sample(name, step)
    if stored is not None:
        return stored
    return entry_sample([store.initial(name)]), entry_sample(store.initial_states(name).values())
