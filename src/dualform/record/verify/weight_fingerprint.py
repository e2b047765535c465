"""Checksums of whole tensors after their last step show whether anything else changes a weight or optimiser state.

All bytes of a weight are read after each step and before the next, so no changed bit is missed (two tensors share a
checksum with probability 2⁻⁶⁴). So are those of the optimiser's state, up to some size. A larger state is identified by
torch's count of writes, which every operation raises except one on ``state.data`` or through NumPy, and by the checksum
of a stretch of it, another one after each step. A change that neither shows appears in the certificate, if it moves the
weights by more than rounding.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from dualform.store import ByteStretch

WHOLE = 1 << 18
"""Optimiser state of up to so many bytes is compared as a whole …"""

STRETCH = 1 << 15
"""… of a larger one a stretch of this length."""


class StateFingerprint(NamedTuple):
    """A tensor of the optimiser's state: its address, its count of writes, and the checksum of a stretch."""

    tensor: Tensor
    address: int
    version: int
    stretch: ByteStretch
    checksum: int


class WeightFingerprints:
    """Checksums of parameters, and fingerprints of the optimiser's state of them, after their last step.

    ``tensors`` are the parameters by name, ``states`` the optimiser's tensors of each as recording begins.
    """

    def __init__(self, tensors: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.tensors = {name: ByteStretch(tensor) for name, tensor in tensors.items()}
        self._turn = 0
        self._weights = {name: stretch.checksum() for name, stretch in self.tensors.items()}
        self._states: dict[str, dict[str, StateFingerprint]] = {name: {} for name in tensors}
        for name in tensors:
            self._take_state(name, states.get(name, {}))

    def take(self, name: str, state: Mapping[str, Tensor]) -> None:
        """A step of a parameter is over: take its checksum and the fingerprint of its state."""
        if name in self.tensors:
            self._turn += 1
            self._weights[name] = self.tensors[name].checksum()
            self._take_state(name, state)

    def changed(self, name: str) -> bool:
        """Whether a parameter differs from what its last step left."""
        return name in self.tensors and self.tensors[name].checksum() != self._weights[name]

    def state_changed(self, name: str, state: Mapping[str, Tensor]) -> bool:
        """Whether the optimiser's state of a parameter was written to, or replaced, since its last step."""
        if name not in self.tensors:
            return False
        before = self._states[name]
        return before.keys() != state.keys() or any(_differs(before[key], tensor) for key, tensor in state.items())

    def _take_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        before = self._states[name]
        self._states[name] = {key: self._state_fingerprint(tensor, before.get(key)) for key, tensor in state.items()}

    def _state_fingerprint(self, tensor: Tensor, before: StateFingerprint | None) -> StateFingerprint:
        size = tensor.nbytes
        if size > WHOLE:
            # a prime, so that the order of stretches differs from that of parameters
            stretch = ByteStretch(tensor, self._turn * 7919 % -(-size // STRETCH) * STRETCH, STRETCH)
        else:
            stretch = before.stretch if before is not None and before.tensor is tensor else ByteStretch(tensor)
        return StateFingerprint(tensor, tensor.data_ptr(), tensor._version, stretch, stretch.checksum())


def _differs(before: StateFingerprint, tensor: Tensor) -> bool:
    if tensor is before.tensor and (tensor.data_ptr(), tensor._version) == (before.address, before.version):
        return before.stretch.checksum() != before.checksum
    compared_whole = before.stretch.size is None  # then its bytes decide, whichever tensor holds them
    return not compared_whole or ByteStretch(tensor).checksum() != before.checksum
