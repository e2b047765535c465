"""A progress bar for passes over the slots."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dualform.attend import Watch

WORTH_SHOWING = 200_000
"""Passes over fewer slots are over before one could read the bar."""


@contextmanager
def bar(what: str, slots: int, show: bool) -> Iterator[Watch | None]:
    """A bar on the terminal that is gone when the pass is over; None where there is nothing to show it on."""
    console = Console(stderr=True)
    if not show or slots < WORTH_SHOWING or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=slots)
        yield _Moving(progress, task)


@dataclass(frozen=True)
class _Moving:
    progress: Progress
    task: TaskID

    def __call__(self, slots: int) -> None:
        self.progress.advance(self.task, slots)
