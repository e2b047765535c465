"""A few entries of every recorded parameter, kept after each step: a fingerprint of the state, bit for bit."""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from .store import Store

COUNT = 32


def sampled_entries(size: int) -> Int[np.ndarray, " k"]:
    """Which entries of a flat tensor are sampled: always the same for its size."""
    return np.arange(size) if size <= COUNT else np.random.default_rng(size).integers(size, size=COUNT)


def sampled_bytes(tensor: Tensor, entries: Int[np.ndarray, " k"]) -> bytes:
    """The entries as they lie in memory."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16 and tensor.is_contiguous():
        return tensor.numpy().ravel()[entries].tobytes()
    return tensor.reshape(-1)[torch.from_numpy(entries).to(tensor.device)].cpu().view(torch.uint8).numpy().tobytes()


def samples_at(store: Store, name: str, step: int) -> tuple[bytes, bytes]:
    """The samples of a parameter and its buffer as they stood at a step of a memory."""
    kept = store.sample(name, step)
    if kept is not None:
        return kept
    first, buffer = store.initial(name), store.initial_buffer(name)
    entries = sampled_entries(first.numel())
    return sampled_bytes(first, entries), b"" if buffer is None else sampled_bytes(buffer, entries)
