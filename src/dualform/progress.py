"""Progress of passes over the slots: a bar on the terminal, or calls of a function; and a sentence if it takes long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Progress = bool | Callable[[str, int, int], None]
"""Whether to show a bar, and to say how long it will take if that is long; or a function that is called with the task,
the slots done and their total number."""

WORTH_SHOWING = 200_000
"""Passes over fewer slots end before anyone could read the bar."""

LONG = 10.0
"""Seconds from which on a pass is announced: "this will take about 40 s"."""

SHARE, LEAST = 0.01, 0.5
"""The share of a pass, and the seconds of it, that are measured before its time is estimated."""


@runtime_checkable
class OnProgress(Protocol):
    """Is called during a pass with the number of slots that were passed since the last call."""

    def __call__(self, slots: int) -> None:
        """Count these slots as done."""
        ...


class _Speech:
    """Who may write to the terminal now: nobody where all is quiet, and only the outermost of several passes."""

    quiet = 0
    passes = 0


@contextmanager
def quietly() -> Iterator[None]:
    """Show no bars, estimates and hints inside this block, in all threads. Functions are still called."""
    _Speech.quiet += 1
    try:
        yield
    finally:
        _Speech.quiet -= 1


def is_quiet() -> bool:
    """Whether a block of :func:`quietly` runs."""
    return _Speech.quiet > 0


@contextmanager
def bar(
    task: str, slots: int, show: Progress, worth: int = WORTH_SHOWING, period: float = 30.0, at_once: int = 0
) -> Iterator[OnProgress | None]:
    """A bar on the terminal that disappears when the pass is over; None if there is nothing to show.

    ``worth`` is the least number of slots (or whatever is counted) for which a bar is shown. The time that remains is
    estimated from the last ``period`` seconds. Whether there is a terminal or not, a pass that will take long is
    announced in one sentence on standard error. ``at_once`` is how many of what is counted are under way at a time.
    """
    if callable(show):
        yield _ProgressCalls(show, task, slots)
        return
    if not show or is_quiet():
        yield None
        return
    console = Console(stderr=True, highlight=False)
    is_outermost = _Speech.passes == 0

    def say(sentence: str) -> None:
        if is_outermost:
            console.print(f"dualform: {sentence}", soft_wrap=True, markup=False)

    announce = PassTime(task, slots, at_once, say)
    _Speech.passes += 1
    try:
        if slots < worth or not console.is_terminal:
            yield announce if is_outermost else None
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=console, transient=True, speed_estimate_period=period) as progress:
            watch = _ProgressBar(progress, progress.add_task(task, total=slots), announce)
            watch(0)  # the time that the first ones take counts as well
            yield watch
    finally:
        _Speech.passes -= 1


@dataclass
class PassTime:
    """Measures the first hundredth of a pass, and says how long all of it will take, once, if that is long.

    What comes before the first call (opening files, the sweep that gives Adam's preconditioners) is counted once, not
    for every hundredth. Where several tasks are under way ``at_once``, as many have to end first.
    """

    task: str
    total: int
    at_once: int
    say: Callable[[str], None]
    clock: Callable[[], float] = time.perf_counter
    seconds: float | None = field(default=None, init=False)
    """The estimate, once there is one."""
    _done: int = field(default=0, init=False)
    _first: tuple[int, float] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    def __call__(self, slots: int) -> None:
        self._done += slots
        if self.seconds is not None or not slots or self._done >= self.total:
            return
        elapsed = self.clock() - self._start
        if self.at_once:
            if self._done >= self.at_once:
                self._estimated(elapsed * -(-self.total // self.at_once) / (self._done / self.at_once), elapsed)
        elif self._first is None:
            self._first = self._done, elapsed
        elif self._done >= SHARE * self.total and elapsed - self._first[1] >= LEAST:
            done, before = self._first
            self._estimated(before + (elapsed - before) * (self.total - done) / (self._done - done), elapsed)

    def _estimated(self, seconds: float, elapsed: float) -> None:
        self.seconds = seconds
        if seconds >= LONG and elapsed < seconds / 2:
            self.say(f"{self.task}: this will take about {in_words(seconds)}.")


def in_words(seconds: float) -> str:
    """A length of time as rough as its estimate: 12 s, 40 s, 3 min, 2 h."""
    if seconds < 20:
        return f"{round(seconds)} s"
    if seconds < 90:
        return f"{round(seconds / 5) * 5} s"
    if seconds < 90 * 60:
        return f"{max(1, round(seconds / 60))} min"
    return f"{round(seconds / 3600)} h"


@dataclass(frozen=True)
class _ProgressBar:
    progress: Bars
    task: TaskID
    announce: PassTime

    def __call__(self, slots: int) -> None:
        self.progress.advance(self.task, slots)
        self.announce(slots)


@dataclass
class _ProgressCalls:
    callback: Callable[[str, int, int], None]
    task: str
    total: int
    done: int = field(default=0, init=False)

    def __call__(self, slots: int) -> None:
        self.done += slots
        self.callback(self.task, self.done, self.total)
