"""Memory that is used again: slots wait for the disk in a few large buffers, so that recording does not grow."""

import math
import queue

import torch
from torch import Tensor

BUFFER_BYTES = 8 << 20


class Arena:
    """Hands out room for one shard from buffers of a common pool, and gives them back when the shard is written."""

    def __init__(self, pool: "queue.SimpleQueue[Tensor]") -> None:
        self.pool = pool
        self.buffers: list[Tensor] = []
        self.used = BUFFER_BYTES

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; large ones get memory of their own."""
        size = math.prod(shape) * dtype.itemsize
        if not 0 < size <= BUFFER_BYTES:
            return torch.empty(shape, dtype=dtype)
        if self.used + size > BUFFER_BYTES:
            try:
                self.buffers.append(self.pool.get_nowait())
            except queue.Empty:
                self.buffers.append(torch.empty(BUFFER_BYTES, dtype=torch.uint8))
            self.used = 0
        begin, self.used = self.used, self.used + -(-size // 64) * 64
        return self.buffers[-1][begin : begin + size].view(dtype).reshape(shape)

    def give_back(self) -> None:
        """The shard is written and nobody else looks at it."""
        for buffer in self.buffers:
            self.pool.put(buffer)
        self.buffers = []
