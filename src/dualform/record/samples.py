"""Samples the recorded parameters after each step, and sees whether anybody else changed one since."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from dualform.memory import sampled_bytes, sampled_entries
from dualform.rules import Rule


class Samples:
    """Samples after each step, and sees whether anybody else changed a parameter since."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._entries = {name: sampled_entries(t.numel()) for name, t in tensors.items()}
        self._turn = 0
        self._last = {name: sampled_bytes(t, self._entries[name]) for name, t in tensors.items()}

    def take(self, name: str, state: Mapping[str, Any], rule: Rule | None) -> tuple[bytes, bytes]:
        """The samples of a parameter and of the optimiser's buffer of it."""
        if name not in self.tensors:
            return b"", b""
        self._last[name] = sampled_bytes(self.tensors[name], self._entries[name])
        buffer = state.get(rule.buffer) if rule and rule.buffer else None
        return self._last[name], b"" if buffer is None else sampled_bytes(buffer, self._entries[name])

    def check(self, names: Iterable[str], mark: Callable[[str, str, str, int], None], step: int) -> None:
        """Mark a parameter that something other than the optimiser's step changed. Looks at one of them each time."""
        names = list(names)
        self._turn += 1
        for name in names[self._turn % len(names) :][:1] if names else []:
            if name in self.tensors and sampled_bytes(self.tensors[name], self._entries[name]) != self._last[name]:
                mark(
                    "edited",
                    name,
                    "it was changed outside the optimiser's step (an edit, a clamp, a loaded checkpoint?): the memory "
                    "does not hold that change",
                    step,
                )
