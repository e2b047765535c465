"""A progress bar for passes over the slots."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Progress = bool | Callable[[str, int, int], None]
"""Whether a bar is shown, or who is told what is done, how many slots of it, and of how many."""

WORTH_SHOWING = 200_000
"""Passes over fewer slots are over before one could read the bar."""


@runtime_checkable
class OnProgress(Protocol):
    """Told how many slots were passed (a progress bar)."""

    def __call__(self, slots: int) -> None:
        """So many slots more."""
        ...


@contextmanager
def bar(what: str, slots: int, show: Progress, worth: int = WORTH_SHOWING) -> Iterator[OnProgress | None]:
    """A bar on the terminal that is gone when the pass is over; None where there is nothing to show it on.

    ``worth`` showing is a pass over so many slots, or whatever else is counted.
    """
    if callable(show):
        yield _Telling(show, what, slots)
        return
    console = Console(stderr=True)
    if not show or slots < worth or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=slots)
        yield _Moving(progress, task)


@dataclass(frozen=True)
class _Moving:
    progress: Bars
    task: TaskID

    def __call__(self, slots: int) -> None:
        self.progress.advance(self.task, slots)


@dataclass
class _Telling:
    tell: Callable[[str, int, int], None]
    what: str
    total: int
    done: int = field(default=0, init=False)

    def __call__(self, slots: int) -> None:
        self.done += slots
        self.tell(self.what, self.done, self.total)
