"""A few entries of each recorded parameter, read after each step: who else changed one since?"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from dualform.memory import sample_of, sampled
from dualform.rules import Rule

from .begin import state_tensors


class Samples:
    """Samples after each step, and sees whether anybody else changed a parameter since."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._some = {name: sampled(tensor) for name, tensor in tensors.items()}
        self._turn = 0
        self._last = {name: self._some[name].of(tensor) for name, tensor in tensors.items()}

    def take(self, name: str, state: Mapping[str, Any], rule: Rule | None) -> tuple[bytes, bytes]:
        """The samples of a parameter and of the optimiser's state of it."""
        some = self._some.get(name)
        if some is None:
            return b"", b""
        now = self._last[name] = some.of(self.tensors[name])
        return now, sample_of(state_tensors(rule, state).values()) if rule else b""

    def check(self, names: Iterable[str], mark: Callable[[str, str, str, int], None], step: int) -> None:
        """Mark a parameter that something other than the optimiser's step changed. Looks at one of them each time."""
        names = list(names)
        self._turn += 1
        for name in names[self._turn % len(names) :][:1] if names else []:
            if name in self.tensors and self._some[name].of(self.tensors[name]) != self._last[name]:
                mark(
                    "edited",
                    name,
                    "it was changed outside the optimiser's step (an edit, a clamp, a loaded checkpoint?): the memory "
                    "does not hold that change",
                    step,
                )
