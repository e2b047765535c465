"""Ctrl-C while the recorder changes its state: the signal is remembered, and delivered when the state is consistent.

Python runs a signal handler between any two instructions of the main thread. The recorder's handler therefore looks at
the stack of that thread. Inside a hook that changes what is recorded, inside the step of a recorded optimiser, and
while recording begins or ends, the signal waits until that section is over. Everywhere else the handler that was
installed before is called at once. As long as no signal comes, this costs no time. Warnings are delayed in the same
way: where they are errors (``python -W error``), they are raised when nothing is half done.
"""

import contextlib
import os
import signal
import sys
import threading
from _signal import getsignal  # pyright: ignore[reportMissingImports] # signal.getsignal takes 8 µs to find an enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any

from torch import optim

from dualform.errors import DualformWarning, warn

INTERRUPTS_TO_GIVE_UP = 3
"""How many interrupts make the recorder give up waiting for the disk."""

Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """Protects the state of one recording from interrupts: delays them while a section runs."""

    def __init__(self) -> None:
        self.due = False
        """Whether a signal or a warning waits to be delivered."""
        self.interruptions = 0
        """How often the user's loop was interrupted, or could have been."""
        self.stepping: optim.Optimizer | None = None
        """The optimiser whose step has begun, until the hook after the step has run."""
        self.gave_up = False
        """Whether the user has stopped waiting for the disk."""
        self._arrived = 0
        self._messages: list[str] = []
        self._waiting_message: str | None = None
        self._installed: InstalledHandler | None = None
        self._sections: dict[CodeType, tuple[str, object]] = {SECTION: ("interrupts", self)}

    # ------------------------------------------------------------------------------------------------- sections

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function as a section: signals and warnings that come while it runs are delivered when it returns."""
        return _section(self, function)

    def guard(self, method: Any) -> None:
        """Register a method as a section. It has to call :meth:`deliver` itself."""
        self._sections[unwrap(method.__func__).__code__] = "self", method.__self__

    def inside(self, frame: FrameType | None) -> bool:
        """Whether a section runs, found out from the stack."""
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
        """Issue the delayed warnings and call the interrupt's handler, unless ``frame`` is still inside a section."""
        if self.inside(frame):
            return
        self.due, self.interruptions = False, self.interruptions + 1
        try:
            self._warn()
        finally:
            if self._arrived and _in_main_thread() and self._installed is not None:
                self._arrived = 0
                self._installed.before(signal.SIGINT, frame)

    # ------------------------------------------------------------------------------------------------- the signal

    def watch(self) -> None:
        """Install a handler of SIGINT in front of the present one, if that is a Python function."""
        if getsignal(signal.SIGINT) is not self._installed or self._installed is None:
            self._install()

    def leave(self) -> None:
        """Restore the earlier handler, if the recorder's is still installed."""
        installed = self._installed
        self._sections = {}
        if installed is not None and _in_main_thread() and getsignal(signal.SIGINT) is installed:
            signal.signal(signal.SIGINT, installed.first_of_others())

    def _install(self) -> None:
        before = getsignal(signal.SIGINT)
        if callable(before) and _in_main_thread():
            self._installed = InstalledHandler(self, before)
            signal.signal(signal.SIGINT, self._installed)

    def arrive(self, before: Handler, number: int, frame: FrameType | None) -> None:
        """A signal has come: call the earlier handler ``before`` now, or after the section."""
        if not self.inside(frame):
            self.interruptions += 1
            before(number, frame)
            return
        self._arrived += 1
        self.due = True
        if self._waiting_message is not None and self._arrived >= INTERRUPTS_TO_GIVE_UP:
            self._arrived, self.gave_up = 0, True
            before(number, frame)
        elif self._waiting_message is not None:
            missing = INTERRUPTS_TO_GIVE_UP - self._arrived
            again = "again" if missing == 1 else f"{missing} more times"
            _write_line(f"dualform: {self._waiting_message} before it stops; press Ctrl-C {again} to give that up.")

    @contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """While the recorder waits for the disk, an interrupt prints ``message``, and several give up."""
        before, self._waiting_message = self._waiting_message, message
        try:
            yield
        finally:
            self._waiting_message = before

    # ------------------------------------------------------------------------------------------------- warnings

    def say(self, message: str) -> None:
        """Issue a warning as soon as no section runs."""
        if message not in self._messages:
            self._messages.append(message)
        self.due = True

    def _warn(self) -> None:
        """Issue all warnings. Where warnings are errors, the first one is raised, with the others as notes."""
        messages, self._messages = self._messages, []
        errors: list[DualformWarning] = []
        for message in messages:
            try:
                warn(message)
            except DualformWarning as error:
                errors.append(error)
        for error in errors[1:]:
            errors[0].add_note(str(error))
        if errors:
            raise errors[0]

    def end(self, error: BaseException | None, frame: FrameType | None) -> None:
        """The recording is over: deliver everything that waited. An ``error`` that ends it comes first."""
        if error is None:
            self.deliver(frame)
            return
        for message in self._messages:
            try:
                warn(message)
            except DualformWarning:
                error.add_note(message)
        self._messages = []
        if not isinstance(error, KeyboardInterrupt):
            self.deliver(frame)


class InstalledHandler:
    """The recorder's handler of SIGINT, and the handler ``before`` it."""

    def __init__(self, interrupts: Interrupts, before: Handler) -> None:
        self.interrupts, self.before = interrupts, before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.interrupts.arrive(self.before, number, frame)

    def first_of_others(self) -> Handler:
        """The nearest earlier handler that does not belong to a recording that is over."""
        before = self.before
        if isinstance(before, InstalledHandler) and not before.interrupts._sections:
            return before.first_of_others()
        return before


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


def _write_line(line: str) -> None:
    """Write to the terminal from a handler: the buffer of ``sys.stderr`` may be in use at this instant."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


SECTION = next(code for code in unwrap(_section).__code__.co_consts if isinstance(code, CodeType))
STEP = optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""The code that runs an optimiser's hooks, and its step between them."""
