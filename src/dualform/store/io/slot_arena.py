"""Memory that is used again: slots wait for the disk in a few large buffers, so that recording does not grow."""

import math

import torch
from torch import Tensor

from .direct_io import PAGE

ARENA_BYTES = 96 << 20


class SlotArena:
    """Hands out room for the slots of one shard. Cleared, it hands out the same room again.

    All of it begins on a page, so that it can go to the disk from where it lies. What is not used takes no memory.
    """

    def __init__(self) -> None:
        memory = torch.empty(ARENA_BYTES + PAGE, dtype=torch.uint8)
        self._buffer = memory[-memory.data_ptr() % PAGE :]
        self._used = 0

    def clear(self) -> None:
        """The shard is on the disk and nobody looks at its slots any more."""
        self._used = 0

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; when all is given away, in memory of its own."""
        size = math.prod(shape) * dtype.itemsize
        if not 0 < size <= ARENA_BYTES - self._used:
            return torch.empty(shape, dtype=dtype)
        begin, self._used = self._used, self._used + -(-size // PAGE) * PAGE
        return self._buffer[begin : begin + size].view(dtype).reshape(shape)
