"""Shared by the trainers' callbacks: a tape that events open and close, since the loop is not the user's own."""

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn, optim

from dualform.errors import MemoryExists, NoteError, RecordError

from .description import make_recipe_of
from .tape import Tape, record

NotedColumns = str | Iterable[str] | Callable[[Any], Mapping[str, Any]]
"""Names of columns, or a function that makes the columns of a batch."""


class TrainerSession:
    """One memory, and the tape that writes to it between two events of a trainer."""

    def __init__(self, path: str | os.PathLike, columns: NotedColumns, options: Mapping[str, Any]) -> None:
        signature(record).bind(None, None, path, **options)  # reject a misspelt option now, not in the first step
        make_recipe_of(Path(path), options.get("describe"))
        self.path, self._options = Path(path), dict(options)
        self._make_columns = columns if callable(columns) else None
        self.names: list[str] = [] if callable(columns) else [columns] if isinstance(columns, str) else list(columns)
        self._tape: Tape | None = None
        self._step: int | None = None
        self._trained: list[weakref.ref] = []
        self._noted: Mapping[str, Any] = {}

    @property
    def step(self) -> int | None:
        """The last step of the memory; None before the first training begins."""
        return self._step if self._tape is None else self._tape.step

    def begin(
        self, model: nn.Module, optimizers: Sequence[optim.Optimizer], saved: int | None, last: int | None = None
    ) -> None:  # fmt: skip
        """Start to record: from the memory's step ``saved`` in a checkpoint, or from where this session stopped.

        A trainer that is called again continues with the same model and the same optimisers, and so does the memory.
        ``last`` is the last step of training, if it is known.
        """
        self.end()  # a trainer may begin again without an event for its end
        options = {**self._options, "resume": self._resume([model, *optimizers], saved)}
        tape = record(model, optimizers, self.path, **options)
        tape.steps_ahead = None if last is None else max(0, last - tape.step)
        tape.__enter__()
        self._tape, self._trained = tape, [weakref.ref(trained) for trained in (model, *optimizers)]
        tape.interrupts.guard(self.end)

    def note(self, batch: Any, columns: Mapping[str, Any] | None = None) -> None:
        """Note the columns of a batch: those that were collected apart from it, and those that it holds itself."""
        if self._tape is not None:
            self._noted = self._columns_of(batch, columns or {})
            self.note_again()

    def note_again(self) -> None:
        """Note the same columns once more: a step has used them up, and the batch takes another step."""
        if self._tape is not None and self._noted:
            self._tape.note_instead(self._noted)

    def flush(self) -> None:
        """Return when all complete steps are on disk."""
        if self._tape is not None:
            self._tape.flush()

    def end(self, error: BaseException | None = None) -> None:
        """Close the tape; after an error with all complete steps."""
        tape, self._tape = self._tape, None
        if tape is not None:
            self._step = tape.step
            tape.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    def _columns_of(self, batch: Any, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._make_columns is not None:
            values = self._make_columns(batch)
            if not isinstance(values, Mapping):
                raise NoteError(
                    "the function columns= must return {name: values} for a batch, but it returned a "
                    f"{type(values).__name__}. Return a dict."
                )
            return values
        available = {**batch, **columns} if isinstance(batch, Mapping) else columns
        for name in self.names:
            if name not in available:
                raise NoteError(f"there is no column '{name}' to note. {_list_available(batch, available)}")
        return {name: available[name] for name in self.names}

    def _resume(self, trained: Sequence[object], saved: int | None) -> int | None:
        if self._step is None:  # the first time, the user's resume= overrides the checkpoint
            resume = self._options.get("resume")
            return saved if resume is None else resume
        if saved is not None:
            return saved
        if [ref() for ref in self._trained] != list(trained):
            raise MemoryExists(
                f"{self.path} holds the {self._step} steps that this callback has recorded before, of another model or "
                "with another optimiser. Give each training a callback with its own path."
            )
        return self._step


def refuse_shared(how: str) -> None:
    """Reject training in which the model is split over several devices, or copied to them for every pass."""
    raise RecordError(
        f"training runs with {how}, so no process has the whole model and its own part of the batch. Record training "
        "on one device, or data-parallel training with one process per device (torchrun, DistributedDataParallel)."
    )


def _list_available(batch: Any, available: Mapping[str, Any]) -> str:
    if available or isinstance(batch, Mapping):
        return f"The columns of a batch are {sorted(map(str, available))}. Pass some of these, or a function of it."
    return f"Here a batch is a {type(batch).__name__}, without names: pass columns as a function of the batch."
