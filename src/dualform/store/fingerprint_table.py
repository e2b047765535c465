"""A few entries of every recorded parameter, kept after each step: a fingerprint of the state, bit for bit."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .format import EntrySample
from .store import Store

COUNT, RUN = 16, 8
"""So many entries of a parameter, in runs of neighbours."""


def sampled_entries(tensor: Tensor) -> EntrySample:
    """Which entries of a tensor are sampled: always the same for its size."""
    return _sampled(tensor.numel(), tensor.dtype)


@lru_cache(maxsize=1 << 12)
def _sampled(size: int, dtype: torch.dtype) -> EntrySample:
    if size <= COUNT:
        return EntrySample([0], size, dtype)
    begins = np.random.default_rng(size).choice(size // RUN, COUNT // RUN, replace=False) * RUN
    return EntrySample(np.sort(begins).tolist(), RUN, dtype)


def entry_sample(tensors: Iterable[Tensor]) -> bytes:
    """The samples of some tensors, one after the other."""
    return b"".join([sampled_entries(tensor).of(tensor) for tensor in tensors])


def entry_samples_at(store: Store, name: str, step: int) -> tuple[bytes, bytes]:
    """The samples of a parameter and of the optimiser's state of it as they stood at a step of a memory."""
    kept = store.sample(name, step)
    if kept is not None:
        return kept
    return entry_sample([store.initial(name)]), entry_sample(store.initial_states(name).values())
