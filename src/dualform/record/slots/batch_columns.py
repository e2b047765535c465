"""The columns that the user notes for a batch, and to which forward passes they belong."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.errors import NoteError

RESERVED = ("visit", "step", "row")
COPY = "copy"
"""The column that numbers the blocks of rows of a note, where each note stands for several."""

WHEN = "Call tape.note before the forward pass of each batch, or after it and before its backward pass."

KINDS = {"b": "bool", "i": "int64", "u": "int64", "f": "float64", "U": "string"}
NO_CALLS: Counter[str] = Counter()
"""Of batches that were not joined."""

FITS = "a number, a string, or one of these for each example"


class Batch:
    """The examples of one batch: its columns, its size once it is known, its first visit once a step has used it."""

    def __init__(self, follows: "Batch | None" = None) -> None:
        self.columns: dict[str, Any] = {}
        self.size: int | None = None
        self.visit = -1
        self.follows = follows
        """The noted batch that these forward passes belong to, unless another note comes before their backward pass."""
        self.forwards = 0
        self.called = False
        """Whether the model was called, with gradients."""
        self.calls_by_then = 0
        """How many calls of any kind the user had made when its rows arrived."""
        self.interruptions = 0
        """How often the user had interrupted the loop when it was noted."""
        self.forwards_first = 0
        """The forward passes before its first note."""
        self.arrived = False
        """Whether a backward pass has reached its rows."""
        self.joined = False
        """Whether its forward passes turned out to belong to the batch that it follows."""
        self.done = False
        """Whether a step has used it."""
        self.instead = False
        """Whether no forward pass need follow its note, since trainers may leave out batches."""
        self.calls: Counter[str] = Counter()
        """How many calls of each module belong to it."""
        self.calls_before: Counter[str] = NO_CALLS
        """The calls of the batch that it turned out to belong to, before it was joined."""
        self.generator: Tensor | None = None
        """Where it can be run again: the state of torch's generator before it, if random numbers do not simply go on
        from the batch before.
        """
        self.in_run = False
        """Whether a step that can be run again has used it."""

    def number(self, first: int, step: int, row: int = 0, copies: int = 1) -> Mapping[str, Any]:
        """Number the visits of the examples, from ``first``; returns their columns, single values not yet repeated.

        ``row`` is the position of the first example in the batch, where several processes have a part of it.
        """
        assert self.size is not None
        self.visit = first
        rows = np.arange(self.size)
        copy = {} if copies == 1 else {COPY: rows // max(1, self.size // copies)}
        return {"visit": rows + first, "step": step, "row": rows + row, **self.columns, **copy}


class BatchColumns:
    """Keeps track of the batch that the loop is in. A batch ends with the next note of the same column, or its step.

    Notes may come before the forward pass or after it. A forward pass after the backward pass of a noted batch, or
    after a late note, may be a further one of that batch or the first of the next batch: the next note decides, or the
    next backward pass if there is no note before it.
    """

    def __init__(
        self, types: Mapping[str, str] | None, copies: int = 1, interruptions: Callable[[], int] = lambda: 0
    ) -> None:  # fmt: skip
        self.types: dict[str, str] | None = None if types is None else dict(types)
        self.copies, self._interruptions = copies, interruptions
        self.batch = Batch()
        self._calls = 0

    def note(self, columns: Mapping[str, Any], instead: bool = False) -> None:
        """Attach columns to the batch that comes next, or to the one whose forward pass has just run."""
        batch = self._batch_of_note(columns)
        size, values = batch.size, {}
        for name, value in columns.items():
            values[name] = self._column(name, value)
            if isinstance(values[name], np.ndarray):
                length = len(values[name])
                if self.copies > 1:
                    values[name] = np.tile(values[name], self.copies)
                if size is not None and length * self.copies != size:
                    raise NoteError(
                        f"column '{name}' has {length} values, but the batch has {size // self.copies} examples; give "
                        "one value per example, or a single value for all."
                    )
                size = length * self.copies
        if not batch.columns:
            batch.forwards_first = batch.forwards
        batch.columns.update(values)
        batch.size, batch.instead, batch.interruptions = size, instead, self._interruptions()
        self.batch = batch

    def _batch_of_note(self, columns: Mapping[str, Any]) -> Batch:
        """The batch that a note belongs to."""
        batch, before = self.batch, self.batch.follows
        if before is not None:
            if before.arrived or any(name in before.columns for name in columns):
                return self._separate(batch, before)
            return self._join(batch, before)
        repeats = any(name in batch.columns for name in columns)
        if batch.done or (batch.arrived and not batch.columns) or repeats:
            self._require_forward(batch)
            return Batch()
        if batch.arrived:
            raise NoteError(
                f"the columns {sorted(columns)} were noted after the backward pass of their batch, of which "
                f"{sorted(batch.columns)} were noted in time. {WHEN}"
            )
        return batch

    def _require_forward(self, batch: Batch) -> None:
        """Raise an error if a note is lost because another one follows before any forward pass."""
        used = batch.forwards or batch.called or batch.arrived or batch.instead
        if batch.columns and not used and batch.interruptions == self._interruptions():
            raise NoteError(
                f"the columns {sorted(batch.columns)} were noted for a batch that no recorded layer has seen: the next "
                f"note, or the end of the recording, came before its forward pass. {WHEN}"
            )

    def _separate(self, batch: Batch, before: Batch) -> Batch:
        """Some forward passes turn out to belong to a new batch."""
        if not before.arrived and batch.forwards != before.forwards_first:
            raise NoteError(
                f"{batch.forwards} forward passes came between two notes of {sorted(before.columns)}, and "
                f"{before.forwards_first} before the first of these: it is not clear which of them belong together. "
                "Call tape.note before the forward passes of each batch."
            )
        batch.follows = None
        return batch

    @staticmethod
    def _join(batch: Batch, before: Batch) -> Batch:
        """Some forward passes turn out to belong to the batch before; returns that batch."""
        batch.joined = True
        batch.calls_before = before.calls.copy()
        before.calls.update(batch.calls)
        before.forwards += batch.forwards
        return before

    def begin_call(self, gradients: bool, by_user: bool) -> None:
        """A module is called, with or without gradients, by the user or again inside a backward pass. Whether it runs a
        recorded layer is not known yet.
        """
        self.batch.called = self.batch.called or gradients
        self._calls += by_user

    def begin_forward(self) -> None:
        """The first recorded layer runs in a call by the user, and a backward pass may follow."""
        batch = self.batch
        if batch.done or (batch.arrived and not batch.columns):
            self.batch = Batch()
        elif batch.columns and (batch.arrived or batch.forwards_first):
            self.batch = Batch(follows=batch)
        self.batch.forwards += 1

    def begin_again(self) -> None:
        """A forward pass runs inside a backward pass. If it has not been seen before, it belongs to a new batch,
        provided that the user has called something since the last batch arrived.
        """
        batch = self.batch
        if batch.done or (batch.arrived and not batch.columns and batch.calls_by_then != self._calls):
            self.batch = Batch()

    def arrived(self, batch: Batch) -> Batch:
        """A backward pass reaches rows of a batch: returns the batch that they belong to, which is final now."""
        before = batch.follows
        if before is not None:
            joined = before if batch.joined else self._join(batch, before)
            if self.batch is batch:
                self.batch = before
            batch = joined
        batch.arrived, batch.calls_by_then = True, self._calls
        return batch

    def close(self) -> None:
        """Recording ends: raise an error if the last note was lost."""
        self._require_forward(self.batch)

    def check(self, batch: Batch) -> None:
        """Raise an error unless a batch has the columns of the batches before it."""
        copy = {} if self.copies == 1 else {COPY: "int64"}
        if self.types is None:
            self.types = {name: _kind(value) for name, value in batch.columns.items()} | copy
        elif batch.columns.keys() | copy.keys() != self.types.keys():
            raise NoteError(
                f"this batch was noted with the columns {sorted(batch.columns)}, the batches before it with "
                f"{sorted(self.types.keys() - copy.keys())}. Note the same columns for every batch: before its forward "
                "pass, or after it and before its backward pass."
            )

    def _column(self, name: str, value: Any) -> Any:
        if name in RESERVED or (name == COPY and self.copies > 1):
            raise NoteError(
                f"a column cannot be called '{name}': dualform writes that one itself. Choose another name."
            )
        try:
            value = _scalar_or_array(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise NoteError(f"column '{name}' must be {FITS}; got a {type(value).__name__} ({error}).") from error
        kind = _kind(value)
        if kind not in KINDS.values() or getattr(value, "ndim", 1) != 1:
            raise NoteError(f"column '{name}' must be {FITS}; got {type(value).__name__} of shape {np.shape(value)}.")
        if self.types is not None and self.types.get(name) != kind:
            before = self.types.get(name)
            raise NoteError(
                f"column '{name}' holds {kind} values now; the batches before had "
                f"{f'{before} values there' if before else f'the columns {sorted(self.types)}'}. Note the same "
                f"columns, with values of one kind, for every batch. {'' if before else WHEN}".rstrip()
            )
        return value


def _scalar_or_array(value: Any) -> Any:
    """Convert a value to a Python scalar or a numpy array."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype is torch.int64 and value.ndim == 1:
            return value.numpy().copy()  # the usual indices and labels, at once
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, str | bool | int | float):
        return value
    value = np.array(value)  # a copy, since loaders reuse their buffers
    return value.item() if value.ndim == 0 else value


def _kind(value: Any) -> str:
    kind = (value if isinstance(value, np.ndarray) else np.asarray(value)).dtype.kind
    return KINDS.get(kind, kind)
