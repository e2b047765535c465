"""A few entries of each recorded parameter after each step: by these the memory knows which model it belongs to."""

from collections.abc import Mapping

from torch import Tensor

from dualform.store import entry_sample, sampled_entries


class WeightSamples:
    """Reads the same entries after every step."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._entries = {name: (tensor, sampled_entries(tensor)) for name, tensor in tensors.items()}

    def take(self, name: str, state: Mapping[str, Tensor]) -> tuple[bytes, bytes]:
        """The samples of a parameter and of the optimiser's state of it."""
        if name not in self._entries:
            return b"", b""
        tensor, entries = self._entries[name]
        return entries.of(tensor), entry_sample(state.values())
