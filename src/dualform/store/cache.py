"""Typed caches that share one budget of bytes: the entry that was unused for the longest time is dropped first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from itertools import count
from threading import RLock
from typing import Any, Generic, TypeVar, cast

from .inference_mode import outside_inference_mode

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

BYTES = 6 << 30
"""The most bytes that all cached answers may take together."""


class CacheBudget:
    """The bytes that several caches share, and their entries in the order of their last use."""

    def __init__(self, limit: int = BYTES) -> None:
        self.limit, self.used = limit, 0
        self.entries = OrderedDict[tuple[int, Hashable], tuple[Any, int]]()
        """Values and their bytes, by the number of their cache (itself it would close a reference cycle) and key."""
        self.numbers = count()
        self.lock = RLock()


class AnswerCache(Generic[Key, Value]):
    """Computed values by key. Several threads may use it; none of them waits for a value that another one computes."""

    def __init__(self, budget: CacheBudget) -> None:
        self._budget, self._number = budget, next(budget.numbers)

    def __call__(self, key: Key, make: Callable[[], Value]) -> Value:
        """The cached value of a key; where there is none, ``make`` computes it and it is cached."""
        entries = self._budget.entries
        with self._budget.lock:
            if (self._number, key) in entries:
                entries.move_to_end((self._number, key))
                return entries[self._number, key][0]
        with outside_inference_mode():
            self[key] = value = make()
        return value

    def __contains__(self, key: Key) -> bool:
        return (self._number, key) in self._budget.entries

    def __setitem__(self, key: Key, value: Value) -> None:
        budget = self._budget
        with budget.lock:
            budget.used -= budget.entries.pop((self._number, key), (None, 0))[1]
            size = bytes_of_answer(value)
            budget.entries[self._number, key] = value, size
            budget.used += size
            while budget.used > budget.limit and len(budget.entries) > 1:
                _, (_, dropped) = budget.entries.popitem(last=False)
                budget.used -= dropped

    def get(self, key: Key) -> Value | None:
        """The cached value of a key; None where there is none."""
        with self._budget.lock:
            return self._budget.entries[self._number, key][0] if (self._number, key) in self._budget.entries else None

    def values(self) -> list[Value]:
        """All cached values, the latest used first."""
        with self._budget.lock:
            values = [value for (number, _), (value, _) in self._budget.entries.items() if number == self._number]
        return cast(list[Value], values[::-1])


def bytes_of_answer(value: Any) -> int:
    """The bytes of all arrays and tensors in a value."""
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(bytes_of_answer, value.values()))
    if isinstance(value, tuple | list):
        return 0 if value and isinstance(value[0], int | float | str) else sum(map(bytes_of_answer, value))
    if is_dataclass(value):
        return sum(bytes_of_answer(getattr(value, field.name)) for field in fields(value))
    return 0
