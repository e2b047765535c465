"""What was computed and is worth keeping: as much as fits, the longest unused goes first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from threading import RLock
from typing import Any, TypeVar

from .inference_mode import outside_inference_mode

Value = TypeVar("Value")

BYTES = 6 << 30
"""What all that is kept may take."""


class AnswerCache:
    """Answers by what was asked. Several threads may use it; nobody waits for what another one makes."""

    def __init__(self, most: int = BYTES) -> None:
        self.most, self._found, self._bytes = most, OrderedDict[Hashable, tuple[Any, int]](), 0
        self._lock = RLock()

    def __call__(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What is kept under a key, or what ``make`` gives now."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key][0]
        with outside_inference_mode():
            self[key] = value = make()
        return value

    def __contains__(self, key: Hashable) -> bool:
        return key in self._found

    def __setitem__(self, key: Hashable, value: Any) -> None:
        with self._lock:
            self._bytes -= self._found.pop(key, (None, 0))[1]
            size = bytes_of_answer(value)
            self._found[key] = value, size
            self._bytes += size
            while self._bytes > self.most and len(self._found) > 1:
                _, (_, gone) = self._found.popitem(last=False)
                self._bytes -= gone

    def get(self, key: Hashable) -> Any:
        """What is kept under a key; None without it."""
        with self._lock:
            return self._found[key][0] if key in self._found else None

    def all(self, kind: str) -> list[Any]:
        """What is kept under keys that begin with this word, the latest first."""
        with self._lock:
            found = [value for key, (value, _) in self._found.items() if isinstance(key, tuple) and key[0] == kind]
        return found[::-1]


def bytes_of_answer(value: Any) -> int:
    """The bytes of all arrays and tensors in a value."""
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(bytes_of_answer, value.values()))
    if isinstance(value, tuple | list):
        return 0 if value and isinstance(value[0], int | float | str) else sum(map(bytes_of_answer, value))
    if is_dataclass(value):
        return sum(bytes_of_answer(getattr(value, each.name)) for each in fields(value))
    return 0
