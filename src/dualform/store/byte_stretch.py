"""The bytes of a tensor, read in place, and their checksum."""

import ctypes
from functools import lru_cache

import torch
import xxhash
from torch import Tensor


class ByteStretch:
    """The bytes of a tensor, or ``size`` of them from ``begin`` on, which are read again and again."""

    __slots__ = ("_address", "_bytes", "_shape", "begin", "size", "tensor")

    def __init__(self, tensor: Tensor, begin: int = 0, size: int | None = None) -> None:
        self.tensor, self.begin, self.size = tensor, begin, size
        self._address = -1
        self._shape: torch.Size | None = None
        self._bytes: ctypes.Array[ctypes.c_char] | bytes = b""

    def checksum(self) -> int:
        """A checksum of all bits."""
        tensor = self.tensor
        if tensor.data_ptr() != self._address or tensor.shape != self._shape or not tensor.is_contiguous():
            return self._locate()
        return xxhash.xxh3_64_intdigest(self._bytes)

    def _locate(self) -> int:
        """The same, where the bytes may have moved since the last time."""
        tensor = self.tensor
        in_place = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
        dense = tensor if in_place else tensor.detach().to_dense()
        end = dense.nbytes if self.size is None else min(self.begin + self.size, dense.nbytes)
        size, begin = max(end - self.begin, 0), self.begin
        if not in_place and size:  # copied from where it is, and no more of it than is read
            first, begin = begin // dense.element_size(), begin % dense.element_size()
            dense = dense.reshape(-1)[first : -(-end // dense.element_size())].cpu()
        data = _bytes(size).from_address(dense.data_ptr() + begin) if size else b""
        if in_place and size:
            self._address, self._shape, self._bytes = tensor.data_ptr(), tensor.shape, data
        return xxhash.xxh3_64_intdigest(data)


def fingerprint(tensor: Tensor) -> int:
    """A checksum of all bits of a tensor."""
    return ByteStretch(tensor).checksum()


@lru_cache(maxsize=1 << 10)
def _bytes(size: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * size
