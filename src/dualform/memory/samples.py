"""A few entries of every recorded parameter, kept after each step: a fingerprint of the state, bit for bit."""

import numpy as np
from torch import Tensor

from .glimpse import Glimpse
from .store import Store

COUNT, RUN = 32, 8
"""So many entries of a parameter, in runs of neighbours."""


def sampled(tensor: Tensor) -> Glimpse:
    """Which entries of a tensor are sampled: always the same for its size."""
    size = tensor.numel()
    if size <= COUNT:
        return Glimpse([0], size, tensor.dtype)
    begins = np.random.default_rng(size).choice(size // RUN, COUNT // RUN, replace=False) * RUN
    return Glimpse(np.sort(begins).tolist(), RUN, tensor.dtype)


def samples_at(store: Store, name: str, step: int) -> tuple[bytes, bytes]:
    """The samples of a parameter and its buffer as they stood at a step of a memory."""
    kept = store.sample(name, step)
    if kept is not None:
        return kept
    first, buffer = store.initial(name), store.initial_buffer(name)
    some = sampled(first)
    return some.of(first), b"" if buffer is None else some.of(buffer)
