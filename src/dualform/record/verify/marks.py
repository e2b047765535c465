"""Marks: events during recording that the memory does not explain. Each is reported once, counted, and kept."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from dualform.types import Mark


class Marks:
    """All marks of a recording. ``say`` warns the user."""

    def __init__(self, before: Iterable[Mark], say: Callable[[str], None]) -> None:
        self._say = say
        self._marks = {(mark.kind, mark.name): mark for mark in before}

    def __call__(self, kind: str, name: str, message: str, step: int) -> None:
        """Mark an event of a parameter or layer in a step; a second one of its kind is only counted."""
        before = self._marks.get((kind, name))
        if before is not None:
            self._marks[kind, name] = replace(before, times=before.times + 1)
            return
        self._marks[kind, name] = Mark(kind, name, step, 1, message)
        self._say(f"'{name}' at step {step}: {message}.")

    def go_back(self, before: Iterable[Mark]) -> None:
        """Restore earlier marks: what happened since will be noticed again."""
        self._marks = {(mark.kind, mark.name): mark for mark in before}

    def take_over(self, before: "Marks") -> None:
        """Go on with the marks of another recording of the same memory."""
        self._marks = {**before._marks}

    def all(self) -> tuple[Mark, ...]:
        """The marks so far."""
        return tuple(self._marks.values())
