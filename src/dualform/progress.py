"""Progress of passes over the slots: a bar on the terminal, or calls of a function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Progress = bool | Callable[[str, int, int], None]
"""Whether to show a bar; or a function that is called with the task, the slots done and their total number."""

WORTH_SHOWING = 200_000
"""Passes over fewer slots end before anyone could read the bar."""


@runtime_checkable
class OnProgress(Protocol):
    """Is called during a pass with the number of slots that were passed since the last call."""

    def __call__(self, slots: int) -> None:
        """Count these slots as done."""
        ...


@contextmanager
def bar(
    task: str, slots: int, show: Progress, worth: int = WORTH_SHOWING, period: float = 30.0
) -> Iterator[OnProgress | None]:
    """A bar on the terminal that disappears when the pass is over; None if there is no terminal or nothing to show.

    ``worth`` is the least number of slots (or whatever is counted) for which a bar is shown. The time that remains is
    estimated from the last ``period`` seconds.
    """
    if callable(show):
        yield _ProgressCalls(show, task, slots)
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
    with Bars(*columns, console=console, transient=True, speed_estimate_period=period) as progress:
        watch = _ProgressBar(progress, progress.add_task(task, total=slots))
        watch(0)  # the time that the first ones take counts as well
        yield watch


@dataclass(frozen=True)
class _ProgressBar:
    progress: Bars
    task: TaskID

    def __call__(self, slots: int) -> None:
        self.progress.advance(self.task, slots)


@dataclass
class _ProgressCalls:
    callback: Callable[[str, int, int], None]
    task: str
    total: int
    done: int = field(default=0, init=False)

    def __call__(self, slots: int) -> None:
        self.done += slots
        self.callback(self.task, self.done, self.total)
