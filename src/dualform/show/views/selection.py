"""The selection: training examples that visitors collected, on whichever page."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

from dualform.errors import QueryError

MOST_SELECTED = 200_000
"""The most examples that are kept."""


class Selection:
    """A set of training examples. It is one for all who use an explorer, so changes take a lock."""

    def __init__(self) -> None:
        self._indices: set[Any] = set()
        self._lock = threading.Lock()

    def add(self, indices: Iterable[Any]) -> None:
        """Add examples; those that are in it already stay."""
        with self._lock:
            together = self._indices | set(indices)
            if len(together) > MOST_SELECTED:
                raise QueryError(f"at most {MOST_SELECTED:,} training examples can be selected. Narrow the filter.")
            self._indices = together

    def remove(self, indices: Iterable[Any]) -> None:
        """Remove examples; those that are not in it do no harm."""
        with self._lock:
            self._indices = self._indices - set(indices)

    def clear(self) -> None:
        """Remove all examples."""
        with self._lock:
            self._indices = set()

    @property
    def indices(self) -> tuple[Any, ...]:
        """The examples in the order of their index."""
        return tuple(sorted(self._indices, key=lambda index: (str(type(index)), index)))

    def __contains__(self, index: Any) -> bool:
        return index in self._indices

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)
