"""A step that was broken off: an error inside ``optimizer.step`` leaves tensors that belong to no complete step."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, optim

from .marks import Marks

BROKEN_OFF = (
    "a step of its optimiser was interrupted by an error, so it or the optimiser's state of it may have changed in "
    "part: the memory does not hold that change"
)

NO_STATE: Mapping[str, Any] = MappingProxyType({})


class UnfinishedStep:
    """Finds the tensors that a step has changed so far. ``tensors`` are those of the memory, by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._state: Mapping[Tensor, Mapping[str, Any]] = {}
        self._before: list[tuple[Tensor, list[int]]] = []
        self._marked = False

    def begin(self, optimizer: optim.Optimizer) -> None:
        """A step begins: note the version of each tensor."""
        self._state, self._marked = optimizer.state, False
        self._before = [
            (parameter, self._versions(parameter)) for group in optimizer.param_groups for parameter in group["params"]
        ]

    def end(self) -> None:
        """The step is over."""
        self._before = []

    def changed(self) -> list[str]:
        """The parameters that changed, or whose optimiser state changed, since the step began."""
        changed = [parameter for parameter, before in self._before if self._versions(parameter) != before]
        return [self._names[id(parameter)] for parameter in changed if id(parameter) in self._names]

    def mark(self, marks: Marks, step: int) -> list[str]:
        """Mark what a step changed that was broken off; returns the names."""
        names = self.changed()
        for name in [] if self._marked else names:
            marks("interrupted-step", name, BROKEN_OFF, step)
        self._marked = True
        return names

    def _versions(self, parameter: Tensor) -> list[int]:
        """How often the parameter and the tensors of its optimiser state have been written to."""
        versions = [parameter._version]
        for value in self._state.get(parameter, NO_STATE).values():
            if isinstance(value, Tensor):
                versions.append(value._version)
        return versions
