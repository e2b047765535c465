"""Checksums of whole tensors after their last step: did anything else change a weight, or the optimiser's state?

A weight is read whole, after each step and before the next, so no changed bit is missed (two tensors share a checksum
with probability 2⁻⁶⁴). Of the optimiser's state that is done up to some size. A larger state is known by torch's count
of writes, which every operation raises but one on ``state.data`` or through NumPy, and by a stretch of it, another one
after each step: what neither shows is seen in the certificate, if it moves the weights by more than rounding.
"""

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

STATE_BYTES = 1 << 18
"""State of up to so many bytes is compared whole, of a larger one a stretch of that length."""


class Written(NamedTuple):
    """A tensor of the optimiser's state: which one it is, how often it was written to, and a checksum of its bytes from
    ``begin`` on.
    """

    address: int
    version: int
    begin: int
    checksum: int


class WeightFingerprints:
    """Checksums of whole parameters, and what was seen of the optimiser's state of them, after their last step.

    ``tensors`` are the parameters by name, ``states`` the optimiser's tensors of each as recording begins.
    """

    def __init__(self, tensors: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.tensors = dict(tensors)
        self._turn = 0
        self._weights = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        self._states = {name: self._of_state(states.get(name, {})) for name in tensors}

    def take(self, name: str, state: Mapping[str, Tensor]) -> None:
        """A step of a parameter is over."""
        if name in self.tensors:
            self._turn += 1
            self._weights[name], self._states[name] = fingerprint(self.tensors[name]), self._of_state(state)

    def changed(self, name: str) -> bool:
        """Whether a parameter differs from what its last step left."""
        return name in self.tensors and fingerprint(self.tensors[name]) != self._weights[name]

    def state_changed(self, name: str, state: Mapping[str, Tensor]) -> bool:
        """Whether the optimiser's state of a parameter was written to, or replaced, since its last step."""
        if name not in self.tensors:
            return False
        before = self._states[name]
        return before.keys() != state.keys() or any(_is_other(before[key], tensor) for key, tensor in state.items())

    def _of_state(self, state: Mapping[str, Tensor]) -> dict[str, Written]:
        return {key: self._written(tensor) for key, tensor in state.items()}

    def _written(self, tensor: Tensor) -> Written:
        stretches = -(-tensor.nbytes // STATE_BYTES) or 1
        begin = self._turn * 7919 % stretches * STATE_BYTES  # a prime: stretches come in another order than parameters
        return Written(tensor.data_ptr(), tensor._version, begin, fingerprint(tensor, begin, STATE_BYTES))


def _is_other(before: Written, tensor: Tensor) -> bool:
    if fingerprint(tensor, before.begin, STATE_BYTES) != before.checksum:
        return True
    same = (tensor.data_ptr(), tensor._version) == (before.address, before.version)
    return not same and tensor.nbytes > STATE_BYTES


def fingerprint(tensor: Tensor, begin: int = 0, size: int | None = None) -> int:
    """A checksum of every bit of a tensor, or of ``size`` bytes of it."""
    if not (tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()):
        tensor = tensor.detach().to_dense().cpu().contiguous()
    size = tensor.nbytes - begin if size is None else min(size, tensor.nbytes - begin)
    return xxhash.xxh3_64_intdigest(_bytes(max(size, 0)).from_address(tensor.data_ptr() + begin)) if size > 0 else 0


@lru_cache(maxsize=1 << 10)
def _bytes(size: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * size
