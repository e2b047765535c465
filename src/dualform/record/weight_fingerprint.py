"""Checksums of whole tensors after their last step: did anything else change a weight, or the optimiser's state?"""

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor


def fingerprint(tensor: Tensor) -> int:
    """A checksum of every bit of a tensor: two that differ share it with probability 2⁻⁶⁴."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data)


class WeightFingerprints:
    """Checksums of parameters, and of the optimiser's state of them, as their last step left them.

    ``tensors`` are the parameters by name, ``states`` the optimiser's tensors of each as recording begins.
    """

    def __init__(self, tensors: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.tensors = tensors
        self._weights = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        self._states = {name: _of_state(states.get(name, {})) for name in tensors}

    def take(self, name: str, state: Mapping[str, Tensor]) -> None:
        """A step of a parameter is over."""
        if name in self.tensors:
            self._weights[name], self._states[name] = fingerprint(self.tensors[name]), _of_state(state)

    def changed(self, name: str) -> bool:
        """Whether a parameter differs from what its last step left."""
        return name in self.tensors and fingerprint(self.tensors[name]) != self._weights[name]

    def state_changed(self, name: str, state: Mapping[str, Tensor]) -> bool:
        """Whether the optimiser's state of a parameter differs from what its last step left."""
        return name in self.tensors and _of_state(state) != self._states[name]


def _of_state(state: Mapping[str, Tensor]) -> dict[str, int]:
    return {key: fingerprint(tensor) for key, tensor in state.items()}
