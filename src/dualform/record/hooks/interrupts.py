"""Ctrl-C while the books are being kept: it is remembered, and delivered when they are in order.

Python runs the handler of a signal between two instructions of the main thread, whichever they are. Ours looks at what
that thread is doing. In a hook of ours that changes what is recorded, in the step of a recorded optimiser, or while
recording begins or ends, the signal waits until that is over; anywhere else the handler that was there before is called
at once. So a recording costs nothing more where nobody presses anything. Warnings wait in the same way: where they are
errors (``python -W error``), they are raised when nothing is left half done.
"""

import contextlib
import os
import signal
import sys
import threading
import warnings
from _signal import getsignal  # pyright: ignore[reportMissingImports] # that of signal looks for an enum, for 8 µs
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any

from torch import optim

from dualform.errors import DualformWarning

MOST = 3
"""While the disk is waited for, so many interrupts are taken as a wish to give up."""

Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """Stands between the interrupts of the user and the state of one recording."""

    def __init__(self) -> None:
        self.due = False
        """Whether anything waits to be delivered."""
        self.interruptions = 0
        """How often the user's loop was interrupted, or may have been."""
        self.stepping: optim.Optimizer | None = None
        """The optimiser whose step has begun, until the hook after it has run."""
        self.gave_up = False
        """Whether the user did not want to wait for the disk any longer."""
        self._arrived = 0
        self._messages: list[str] = []
        self._waits_for: str | None = None
        self._standing: InstalledHandler | None = None
        self._sections: dict[CodeType, tuple[str, object]] = {SECTION: ("interrupts", self)}

    # ------------------------------------------------------------------------------------------------- sections

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function as a section: what arrives while it runs is delivered when it is over."""
        return _section(self, function)

    def guard(self, method: Any) -> None:
        """Take a method for a section, too. It has to call :meth:`deliver` itself."""
        self._sections[unwrap(method.__func__).__code__] = "self", method.__self__

    def inside(self, frame: FrameType | None) -> bool:
        """Whether a section is being run, by what is on the stack."""
        while frame is not None:
            code = frame.f_code
            name, owner = self._sections.get(code, ("", None))
            if owner is not None and frame.f_locals.get(name) is owner:
                return True
            if code is STEP and self.stepping is not None and frame.f_locals.get("self") is self.stepping:
                return True
            frame = frame.f_back
        return False

    def deliver(self, frame: FrameType | None) -> None:
        """Say what is to be said and call the handler of the interrupt, unless ``frame`` is still inside a section."""
        if self.inside(frame):
            return
        self.due, self.interruptions = False, self.interruptions + 1
        try:
            self._say()
        finally:
            if self._arrived and _in_main_thread() and self._standing is not None:
                self._arrived = 0
                self._standing.before(signal.SIGINT, frame)

    # ------------------------------------------------------------------------------------------------- the signal

    def watch(self) -> None:
        """Stand before the handler of SIGINT that is there now, if it is a function of Python's."""
        if getsignal(signal.SIGINT) is not self._standing or self._standing is None:
            self._stand()

    def leave(self) -> None:
        """Put the handler back, if ours is still in place."""
        standing = self._standing
        self._sections = {}
        if standing is not None and _in_main_thread() and getsignal(signal.SIGINT) is standing:
            signal.signal(signal.SIGINT, standing.last())

    def _stand(self) -> None:
        before = getsignal(signal.SIGINT)
        if callable(before) and _in_main_thread():
            self._standing = InstalledHandler(self, before)
            signal.signal(signal.SIGINT, self._standing)

    def arrive(self, before: Handler, number: int, frame: FrameType | None) -> None:
        """Call the handler ``before`` ours now, or later."""
        if not self.inside(frame):
            self.interruptions += 1
            before(number, frame)
            return
        self._arrived += 1
        self.due = True
        if self._waits_for is not None and self._arrived >= MOST:
            self._arrived, self.gave_up = 0, True
            before(number, frame)
        elif self._waits_for is not None:
            left = "again" if self._arrived == MOST - 1 else f"{MOST - self._arrived} times more"
            _tell(f"dualform: {self._waits_for} before it stops; Ctrl-C {left} gives that up.")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """While the disk is waited for, the user is told so, and may give up."""
        before, self._waits_for = self._waits_for, what
        try:
            yield
        finally:
            self._waits_for = before

    # ------------------------------------------------------------------------------------------------- warnings

    def say(self, message: str) -> None:
        """Warn, when nothing is left half done."""
        if message not in self._messages:
            self._messages.append(message)
        self.due = True

    def _say(self) -> None:
        """Warn; where warnings are errors, one is raised with all of them."""
        messages, self._messages = self._messages, []
        errors: list[DualformWarning] = []
        for message in messages:
            try:
                warnings.warn(message, DualformWarning, stacklevel=4)
            except DualformWarning as error:
                errors.append(error)
        for error in errors[1:]:
            errors[0].add_note(str(error))
        if errors:
            raise errors[0]

    def end(self, error: BaseException | None, frame: FrameType | None) -> None:
        """The recording is over: deliver all that waited. What the user is told already by ``error`` comes first."""
        if error is None:
            self.deliver(frame)
            return
        for message in self._messages:
            try:
                warnings.warn(message, DualformWarning, stacklevel=3)
            except DualformWarning:
                error.add_note(message)
        self._messages = []
        if not isinstance(error, KeyboardInterrupt):
            self.deliver(frame)


class InstalledHandler:
    """Our handler, and the one ``before`` it."""

    def __init__(self, interrupts: Interrupts, before: Handler) -> None:
        self.interrupts, self.before = interrupts, before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """A signal has arrived."""
        self.interrupts.arrive(self.before, number, frame)

    def last(self) -> Handler:
        """The handler before all of ours that belong to recordings that are over."""
        before = self.before
        return before.last() if isinstance(before, InstalledHandler) and not before.interrupts._sections else before


def _section(interrupts: Interrupts, function: Callable[..., Any]) -> Callable[..., Any]:
    def section(*args):
        try:
            result = function(*args)
        except BaseException:
            if interrupts._arrived:
                interrupts.deliver(sys._getframe(1))
            raise
        if interrupts.due:
            interrupts.deliver(sys._getframe(1))
        return result

    return section


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _tell(line: str) -> None:
    """Write to the terminal from a handler: the buffer of ``sys.stderr`` may be in use at this instant."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


SECTION = next(code for code in unwrap(_section).__code__.co_consts if isinstance(code, CodeType))
STEP = optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""What runs the hooks of an optimiser, and its step between them."""
