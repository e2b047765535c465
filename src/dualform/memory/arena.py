"""Memory that is used again: slots wait for their shard in a few large buffers, so that recording does not grow."""

import math

import torch
from torch import Tensor

BUFFER_BYTES = 8 << 20


class Arena:
    """Hands out room for the slots of one shard. Cleared, it hands out the same room again."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        """The shard is packed and nobody looks at its slots any more."""
        self._at, self._used = -1, BUFFER_BYTES

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; large ones get memory of their own."""
        size = math.prod(shape) * dtype.itemsize
        if not 0 < size <= BUFFER_BYTES:
            return torch.empty(shape, dtype=dtype)
        if self._used + size > BUFFER_BYTES:
            self._at, self._used = self._at + 1, 0
            if self._at == len(self._buffers):
                self._buffers.append(torch.empty(BUFFER_BYTES, dtype=torch.uint8))
        begin, self._used = self._used, self._used + -(-size // 64) * 64
        return self._buffers[self._at][begin : begin + size].view(dtype).reshape(shape)
