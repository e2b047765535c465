"""Weights and optimiser state as their last step left them: did anything else change one since?"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from dualform.memory import sample_of


def fingerprint(tensor: Tensor) -> int:
    """A checksum of every bit of a tensor: two that differ share it with probability 2⁻⁶⁴."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data)


class WeightFingerprints:
    """Checksums of whole parameters, and what was seen of the optimiser's state of them, after their last step.

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
        return name in self.tensors and not self._states[name].same(state)


class StateSeen(NamedTuple):
    """The tensors of a state, how often each was written to, and a few entries of all of them."""

    versions: tuple[tuple[str, Tensor, int], ...]
    sample: bytes

    def same(self, state: Mapping[str, Tensor]) -> bool:
        """Whether a state is this one: no tensor was replaced or written to, or the entries say that nothing came of
        it. Twice the size of the weights, a state is not read whole at every step.
        """
        versions = tuple((key, tensor, tensor._version) for key, tensor in state.items())
        if len(versions) == len(self.versions) and all(
            a[0] == b[0] and a[1] is b[1] and a[2] == b[2] for a, b in zip(versions, self.versions, strict=True)
        ):
            return True
        return [key for key, _, _ in self.versions] == list(state) and sample_of(state.values()) == self.sample


def _of_state(state: Mapping[str, Tensor]) -> StateSeen:
    return StateSeen(tuple((key, t, t._version) for key, t in state.items()), sample_of(state.values()))
