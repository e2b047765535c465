"""A step that has begun and not ended: an error inside ``optimizer.step`` leaves tensors that belong to no step."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, optim

from .marks import Marks

BROKEN_OFF = (
    "a step of its optimiser was interrupted by an error, so it or the optimiser's state of it may have changed in "
    "part: the memory does not hold that change"
)


class UnfinishedStep:
    """Knows which tensors a step has changed so far. ``tensors`` are those that the memory keeps, by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._state: Mapping[Tensor, Mapping[str, Any]] = {}
        self._before: list[tuple[Tensor, list[int]]] = []
        self._marked = False

    def begin(self, optimizer: optim.Optimizer) -> None:
        """A step begins: remember how often each tensor had been written to."""
        self._state, self._marked = optimizer.state, False
        self._before = [
            (parameter, self._versions(parameter)) for group in optimizer.param_groups for parameter in group["params"]
        ]

    def end(self) -> None:
        """The step is over."""
        self._before = []

    def changed(self) -> list[str]:
        """The parameters that the step under way has changed, or the optimiser's state of them."""
        changed = [parameter for parameter, before in self._before if self._versions(parameter) != before]
        return [self._names[id(parameter)] for parameter in changed if id(parameter) in self._names]

    def mark(self, marks: Marks, step: int) -> list[str]:
        """Mark what a step changed that will not end any more; returns the names."""
        names = self.changed()
        for name in [] if self._marked else names:
            marks("interrupted-step", name, BROKEN_OFF, step)
        self._marked = True
        return names

    def _versions(self, parameter: Tensor) -> list[int]:
        """How often the parameter and the tensors of its state have been written to."""
        state = self._state.get(parameter)
        kept = [value._version for value in state.values() if isinstance(value, Tensor)] if state else []
        return [parameter._version, *kept]
