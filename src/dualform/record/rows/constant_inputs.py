"""Modules that the loop calls with the same input in every batch: a table of positions, not rows of examples."""

from collections.abc import Iterable

import torch
from torch import Tensor

COMPARED = 3
"""Calls of a module that are compared with the one before."""


class ConstantInputs:
    """Compares the inputs of a module's first calls. Training on one batch again and again tells nothing: there the
    inputs of all modules are the same.
    """

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}
        self._calls: dict[str, int] = {}
        self._changing: set[str] = set()

    def see(self, path: str, values: Iterable[object]) -> bool:
        """A module is called with some values; says whether anything new is known."""
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
        """Whether the input of a module has always been the same, while that of another module changed."""
        return path not in self._changing and self._calls.get(str(path), 0) > 1 and bool(self._changing)
