"""Reused memory: slots wait for the disk in a few large buffers, so that the memory use of recording does not grow."""

import math

import torch
from torch import Tensor

from .direct_io import PAGE

ARENA_BYTES = 96 << 20


class SlotArena:
    """Allocates tensors for the slots of one shard; after ``clear`` it allocates the same memory again.

    Every tensor begins on a page, so that it can be written without a copy. Unused parts take no physical memory.
    """

    def __init__(self) -> None:
        memory = torch.empty(ARENA_BYTES + PAGE, dtype=torch.uint8)
        self._buffer = memory[-memory.data_ptr() % PAGE :]
        self._used = 0
        self.clears = 0
        """How often its memory was made available again."""

    def clear(self) -> None:
        """Make all memory available again: the shard is on disk and its slots are no longer read."""
        self._used = 0
        self.clears += 1

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, in memory of its own if the arena is full."""
        size = math.prod(shape) * dtype.itemsize
        if not 0 < size <= ARENA_BYTES - self._used:
            return torch.empty(shape, dtype=dtype)
        begin, self._used = self._used, self._used + -(-size // PAGE) * PAGE
        return self._buffer[begin : begin + size].view(dtype).reshape(shape)
