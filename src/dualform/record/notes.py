"""The columns that the user notes for a batch, and the visits they become."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dualform.errors import NoteError

RESERVED = ("visit", "step", "row")
KINDS = {"b": "bool", "i": "int64", "u": "int64", "f": "float64", "U": "string"}
FITS = "a number, a string, or one of these for each example"


class Batch:
    """The examples of one batch: its columns, its size once known, its first visit once a step has used it."""

    def __init__(self) -> None:
        self.columns: dict[str, Any] = {}
        self.size: int | None = None
        self.visit = -1
        self.arrived = False
        self.done = False
        self.calls: Counter[str] = Counter()

    def number(self, first: int, step: int, row: int = 0) -> Mapping[str, Any]:
        """Give the examples their visit numbers: the lines of the table, single values not yet repeated.

        ``row`` is the place of the first one in the batch, where several processes have a part of it.
        """
        assert self.size is not None
        self.visit = first
        rows = np.arange(self.size)
        return {"visit": rows + first, "step": step, "row": rows + row, **self.columns}


class Notes:
    """Which batch the loop is in. A batch ends with the next note of a column it already has, or with its step."""

    def __init__(self, types: Mapping[str, str] | None) -> None:
        self.types: dict[str, str] | None = None if types is None else dict(types)
        self.batch = Batch()

    def note(self, columns: Mapping[str, Any]) -> None:
        """Attach columns to the batch that comes next (or to the one whose forward pass has just run)."""
        batch = self.batch
        if batch.done or (batch.arrived and not batch.columns) or any(name in batch.columns for name in columns):
            batch = Batch()
        size = batch.size
        found = {}
        for name, value in columns.items():
            found[name] = self._column(name, value)
            if isinstance(found[name], np.ndarray):
                length = len(found[name])
                if size is not None and length != size:
                    raise NoteError(
                        f"column '{name}' has {length} values, but the batch has {size} examples; give one value an "
                        "example, or a single value for all."
                    )
                size = length
        batch.columns.update(found)
        batch.size = size
        self.batch = batch

    def before_forward(self) -> None:
        """A forward pass begins: without a note since the last backward pass it is a batch of its own."""
        if self.batch.done or (self.batch.arrived and not self.batch.columns):
            self.batch = Batch()

    def check(self, batch: Batch) -> None:
        """Every batch of a recording has the same columns."""
        if self.types is None:
            self.types = {name: _kind(value) for name, value in batch.columns.items()}
        elif batch.columns.keys() != self.types.keys():
            raise NoteError(
                f"this batch was noted with the columns {sorted(batch.columns)}, the batches before it with "
                f"{sorted(self.types)}. Note the same columns for every batch."
            )

    def _column(self, name: str, value: Any) -> Any:
        if name in RESERVED:
            raise NoteError(
                f"a column cannot be called '{name}': dualform writes that one itself. Choose another name."
            )
        try:
            value = _plain(value)
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
                "columns, with values of one kind, for every batch."
            )
        return value


def _plain(value: Any) -> Any:
    """A single value, or an array of values."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, str | bool | int | float):
        return value
    value = np.array(value)  # a copy: loaders use their buffers again
    return value.item() if value.ndim == 0 else value


def _kind(value: Any) -> str:
    kind = np.asarray(value).dtype.kind
    return KINDS.get(kind, kind)
