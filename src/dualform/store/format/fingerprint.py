"""A few entries of a tensor, read as bytes.

Between the matrix products of training, indexing a tensor costs far more than reading a few numbers should. So the
bytes of a plain contiguous tensor are copied directly from memory, and converted to numbers only when they are needed.
"""

import math
from collections.abc import Sequence
from ctypes import string_at
from struct import Struct

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)
_LETTERS = {torch.float64: "d", torch.float32: "f", torch.float16: "e"}


class EntrySample:
    """Which entries of a flattened tensor are sampled: runs of ``width`` neighbours, which share a cache line."""

    def __init__(self, begins: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self.begins, self.width, self.dtype = tuple(begins), width, dtype
        self._offsets = [begin * dtype.itemsize for begin in begins]
        self._bytes = width * dtype.itemsize
        self._numbers = Struct(f"{len(self.begins) * width}{_LETTERS[dtype]}") if dtype in _LETTERS else None

    def __len__(self) -> int:
        return len(self.begins) * self.width

    def of(self, tensor: Tensor) -> bytes:
        """The sampled entries of a tensor as bytes, in its own precision."""
        if (
            type(tensor) in _PLAIN and tensor.is_cpu and tensor.dtype is self.dtype and tensor.layout is torch.strided
            and tensor.is_contiguous()
        ):  # fmt: skip
            address, size = tensor.data_ptr(), self._bytes
            return b"".join([string_at(address + offset, size) for offset in self._offsets])
        entries = tensor.detach().to_dense().reshape(-1)[self.index.to(tensor.device)]
        return entries.to("cpu", self.dtype).view(torch.uint8).numpy().tobytes()

    def norm_of(self, tensor: Tensor) -> float:
        """The norm of the sampled entries of a tensor."""
        read = self.of(tensor)
        return math.hypot(*(self.values([read])[0].tolist() if self._numbers is None else self._numbers.unpack(read)))

    @property
    def index(self) -> Tensor:
        """The indices of the sampled entries in the flattened tensor."""
        return (torch.tensor(self.begins)[:, None] + torch.arange(self.width)).flatten()

    def values(self, read: Sequence[bytes]) -> Float[np.ndarray, "n k"]:
        """Samples that were read as bytes, as numbers."""
        flat = torch.frombuffer(bytearray(b"".join(read)), dtype=self.dtype) if len(self) and read else torch.zeros(0)
        return flat.double().numpy().reshape(len(read), len(self))

    def finite(self, read: bytes) -> bool:
        """Whether no entry of a sample is NaN or infinite."""
        if self._numbers is not None and math.isfinite(sum(self._numbers.unpack(read))):
            return True
        return bool(np.isfinite(self.values([read])).all())

    def square(self, read: bytes) -> float:
        """The sum of the squares of a sample."""
        numbers = self.values([read])[0].tolist() if self._numbers is None else self._numbers.unpack(read)
        return math.fsum([number * number for number in numbers])

    def zero(self, read: bytes) -> bool:
        """Whether all entries of a sample are zero."""
        return not read.strip(b"\0\x80") and not self.values([read]).any()  # 0x80: the sign of a negative zero
