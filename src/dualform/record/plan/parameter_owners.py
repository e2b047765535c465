"""Which optimiser trains a parameter: the only part of a plan that grows while training runs."""

from collections.abc import Sequence

from torch import Tensor, optim


class ParameterOwners:
    """The number of the optimiser that trains each parameter. A parameter in none of them may be added later."""

    def __init__(self, optimizers: Sequence[optim.Optimizer]) -> None:
        self._numbers = {
            id(parameter): number
            for number, optimizer in enumerate(optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def add(self, parameter: Tensor, number: int) -> None:
        """An optimiser takes a step on a parameter: it is the owner, if the parameter had none."""
        self._numbers.setdefault(id(parameter), number)

    def number_of(self, parameter: Tensor) -> int:
        """The number of a parameter's optimiser; the first one where none has it yet."""
        return self._numbers.get(id(parameter), 0)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._numbers
