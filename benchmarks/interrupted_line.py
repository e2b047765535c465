"""Something happens at a chosen line of the recorder: in a hook, a digest, the optimiser's step (``interrupts.py``)."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torch import optim

from dualform.record.hooks import interrupts
from dualform.store import shard_writer as writer

RECORD = Path(interrupts.__file__).parents[1]
FILES = {str(file) for file in (*RECORD.rglob("*.py"), writer.__file__, *Path(optim.__file__).parent.glob("*.py"))}
FILES -= {interrupts.__file__}  # the handler itself

PLACES = {
    ("tape.py", "__enter__"): "begin",
    ("tape.py", "__exit__"): "close",
    ("tape.py", "note"): "note",
    ("tape.py", "flush"): "flush",
    ("protocol.py", "_after"): "forward hook",
    ("backward_hooks.py", "_error"): "backward hook",
    ("backward_hooks.py", "_ended"): "end of backward",
    ("optimizer_hooks.py", "_before"): "hook before the step",
    ("step_hooks.py", "_after"): "hook after the step",
    ("shard_builder.py", "_digest"): "digest",
    ("shard_builder.py", "_complete_shard"): "hand-over",
    ("shard_builder.py", "_send"): "hand-over",
    (Path(interrupts.STEP.co_filename).name, interrupts.STEP.co_name): "optimiser's step",
}
"""Functions, and what the page calls all that happens inside them."""


class Aim:
    """Calls ``shoot`` when so many lines of a place have been run, but not at the lines of ``spared`` functions."""

    def __init__(self, targets: set[tuple[str, int]], shoot: Callable[[], None], spared: str = "") -> None:
        self.targets, self.shoot, self.spared = targets, shoot, spared
        self.lines: Counter[str] = Counter()
        self.hit: Counter[str] = Counter()

    def begin(self) -> None:
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in FILES else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and (place := place_of(frame)):
            self.lines[place] += 1
            if (place, self.lines[place]) in self.targets and frame.f_code.co_name != self.spared:
                self.hit[place] += 1
                self.shoot()
        return self._line


def place_of(frame: FrameType | None) -> str | None:
    while frame is not None:
        code = frame.f_code
        if (place := PLACES.get((os.path.basename(code.co_filename), code.co_name))) and code.co_filename in FILES:
            return place
        frame = frame.f_back
    return None


class Injected(Exception):
    """In place of what nobody foresees."""


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise Injected("no memory left")
