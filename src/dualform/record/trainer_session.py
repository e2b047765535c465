"""What the callbacks for trainers share: a tape that events open and close, as the loop is not the user's own."""

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn, optim

from dualform.errors import MemoryExists, NoteError, RecordError

from .tape import Tape, record

NotedColumns = str | Iterable[str] | Callable[[Any], Mapping[str, Any]]
"""Names of columns, or what makes them of a batch."""


class TrainerSession:
    """One memory, and the tape that writes to it from one event to another."""

    def __init__(self, path: str | os.PathLike, columns: NotedColumns, options: Mapping[str, Any]) -> None:
        signature(record).bind(None, None, path, **options)  # a misspelt option is refused now, not in the first step
        self.path, self._options = Path(path), dict(options)
        self._make = columns if callable(columns) else None
        self.names: list[str] = [] if callable(columns) else [columns] if isinstance(columns, str) else list(columns)
        self._tape: Tape | None = None
        self._step: int | None = None
        self._trained: list[weakref.ref] = []
        self._noted: Mapping[str, Any] = {}

    @property
    def step(self) -> int | None:
        """The step at which the memory stands, once there is one."""
        return self._step if self._tape is None else self._tape.step

    def begin(
        self, model: nn.Module, optimizers: Sequence[optim.Optimizer], saved: int | None, last: int | None = None
    ) -> None:  # fmt: skip
        """Record from here on: from the memory's step that a checkpoint ``saved``, or from where this session stopped.

        A trainer that is called again goes on with the same model and the same optimisers, and so does the memory.
        ``last`` is the step that training is to end with, where that is known.
        """
        self.end()  # a trainer may begin again without having come to an end
        options = {**self._options, "resume": self._resume([model, *optimizers], saved)}
        tape = record(model, optimizers, self.path, **options)
        tape.steps_ahead = None if last is None else max(0, last - tape.step)
        tape.__enter__()
        self._tape, self._trained = tape, [weakref.ref(each) for each in (model, *optimizers)]
        tape.interrupts.guard(self.end)

    def note(self, batch: Any, known: Mapping[str, Any] | None = None) -> None:
        """Note the columns of a batch: those ``known`` already, and those that it holds itself."""
        if self._tape is not None:
            self._noted = self._columns(batch, known or {})
            self.note_again()

    def note_again(self) -> None:
        """Note the same columns once more: a step has used them up, and the batch is to take another."""
        if self._tape is not None and self._noted:
            self._tape.note_instead(self._noted)

    def flush(self) -> None:
        """Come back when all complete steps are on disk."""
        if self._tape is not None:
            self._tape.flush()

    def end(self, error: BaseException | None = None) -> None:
        """Close the tape; after an error with what is complete."""
        tape, self._tape = self._tape, None
        if tape is not None:
            self._step = tape.step
            tape.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    def _columns(self, batch: Any, known: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._make is not None:
            made = self._make(batch)
            if not isinstance(made, Mapping):
                raise NoteError(
                    f"columns must give {{name: values}} for a batch, but gave a {type(made).__name__}. Return a dict."
                )
            return made
        at_hand = {**batch, **known} if isinstance(batch, Mapping) else known
        for name in self.names:
            if name not in at_hand:
                raise NoteError(f"there is no column '{name}' to note. {_what_is_there(batch, at_hand)}")
        return {name: at_hand[name] for name in self.names}

    def _resume(self, trained: Sequence[object], saved: int | None) -> int | None:
        if self._step is None:  # the first time the user's word counts most
            given = self._options.get("resume")
            return saved if given is None else given
        if saved is not None:
            return saved
        if [ref() for ref in self._trained] != list(trained):
            raise MemoryExists(
                f"{self.path} holds the {self._step} steps that this callback has recorded before, of another model or "
                "with another optimiser. Give each training a callback with a path of its own."
            )
        return self._step


def refuse_shared(how: str) -> None:
    """Where a model lies in pieces on several devices, or is copied to them anew for every pass, no process has it."""
    raise RecordError(
        f"training runs with {how}, so no process has the whole model and its own part of the batch. Record training "
        "on one device, or data-parallel training with a process for each (torchrun, DistributedDataParallel)."
    )


def _what_is_there(batch: Any, at_hand: Mapping[str, Any]) -> str:
    if at_hand or isinstance(batch, Mapping):
        return f"The columns at hand are {sorted(map(str, at_hand))}. Pass some of these, or a function of the batch."
    return f"A batch is a {type(batch).__name__} here, without names: pass columns as a function of the batch."
