"""Finds modules that the loop calls with the same input in every batch, as a table of positions."""

from collections.abc import Iterable

import torch
from torch import Tensor

COMPARED = 3
"""How many calls of a module are compared with the call before."""


class ConstantInputs:
    """Compares the inputs of a module's first calls. If all modules have the same input in every batch (training on a
    single batch), none of them counts as constant.
    """

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}
        self._calls: dict[str, int] = {}
        self._changing: set[str] = set()

    def see(self, path: str, values: Iterable[object]) -> bool:
        """A module is called with some values; returns whether they were compared with earlier ones."""
        if path in self._changing or self._calls.get(path, 0) > COMPARED:
            return False
        tensor = next((value.detach() for value in values if isinstance(value, Tensor)), None)
        if tensor is None:
            return False
        last = self._last.get(path)
        self._last[path], self._calls[path] = tensor.clone(), self._calls.get(path, 0) + 1
        if last is not None and (last.shape != tensor.shape or not torch.equal(last, tensor)):
            self._changing.add(path)
            del self._last[path]
        return last is not None

    def __contains__(self, path: object) -> bool:
        """Whether the input of a module never changed, while that of another module did."""
        return path not in self._changing and self._calls.get(str(path), 0) > 1 and bool(self._changing)
