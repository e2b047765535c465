"""How much of a piece of work is done and how long the rest takes, by its reports and, between them, by the clock."""

import math
import time
from collections.abc import Callable

ENOUGH = 0.3
"""The reported share from which on the time that is left follows from the work alone, and no more from the estimate."""

OVERDUE = 0.15
"""What is left at least, relative to the time that has passed: overdue work is not done yet."""


class TimedProgress:
    """The progress of a piece of work that is estimated to take some seconds and that may report what it has done.

    The shown share never falls and grows with every look, so that a bar moves although the work reports rarely or not
    at all; it reaches 1 when the work is done and not before.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._begun: float | None = None
        self._reported: tuple[float, float] | None = None
        self._several_passes = False
        self._shown, self._looked = 0.0, 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._begun = self._looked = self._clock()
        self._reported, self._several_passes, self._shown = None, False, 0.0

    def report(self, share: float) -> None:
        """Take a report of the work. Work that begins to count again makes several passes, whose number is unknown."""
        share = min(1.0, share)
        if self._reported is not None and share < self._reported[0]:
            self._several_passes, self._reported = True, None
        if not self._several_passes:
            self._reported = share, self.elapsed

    @property
    def elapsed(self) -> float:
        """Seconds since it began; 0 before that."""
        return 0.0 if self._begun is None else self._clock() - self._begun

    @property
    def left(self) -> float:
        """Estimated seconds until it is done."""
        total, elapsed = self.seconds, self.elapsed
        if self._reported is not None and self._reported[0] > 0.0:
            share, at = self._reported
            trust = min(1.0, share / ENOUGH)
            total = (1 - trust) * total + trust * at / share
        return max(total - elapsed, OVERDUE * elapsed)

    @property
    def share(self) -> float:
        """The share that is done, from 0 to 1."""
        if self._begun is None:
            return 0.0
        now, left = self._clock(), self.left
        passed, self._looked = max(0.0, now - self._looked), now
        before = left + passed
        self._shown += (1 - self._shown) * (passed / before if before > 0 else 0.0)
        if self._reported is not None:
            self._shown = max(self._shown, self._reported[0])
        self._shown = min(self._shown, math.nextafter(1.0, 0.0))
        return self._shown

    def end(self) -> None:
        """All is done."""
        self._shown = 1.0
