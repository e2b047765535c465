"""Buffers where slots wait for their step: copies of inputs and errors, in the precision of the store.

They are encoded right after the backward pass, while they are still in the processor's cache: later they would have to
be read from memory a second time.
"""

import weakref
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.store import INDEX, STORED, EncodedRows, RowTarget, SlotArena, bytes_a_row
from dualform.types import DType, LayerInfo

from ..plan import CertificateColumns, sizes_of
from .batch_columns import Batch
from .model_calls import ModelCall

SHARD_BYTES = 64 << 20
"""The size of a shard."""

MIN_ROWS, MAX_ROWS = 64, 1 << 15
"""The least and the largest number of rows that a run has room for, unless one call has more."""


class CallSlots:
    """The slots of one call, and their place in a run of rows."""

    __slots__ = (
        "__weakref__", "batch", "begin", "end", "entry", "eps", "error_square", "finite", "key_square", "layer",
        "leading", "module", "number", "order", "place", "run",
    )  # fmt: skip

    def __init__(self, layer: LayerInfo, module: str, leading: tuple[int, ...], batch: Batch, number: int) -> None:
        self.layer, self.module, self.batch, self.number = layer, module, batch, number
        self.leading = leading or (1,)  # a single row counts as a batch of one
        self.entry: ModelCall | None = None
        """The user's call that it was a part of, if that is known."""
        self.order: int | None = None
        """Its number among the calls of its module inside the user's call."""
        self.place: tuple[str, int] = module, 0
        """The module's first name, and the number of the map among those that the call went through."""
        self.run: RowRun
        self.begin = self.end = 0
        self.eps = 0.0
        self.finite = True
        self.key_square = self.error_square = 0.0
        """The sums of |x|² and of |e|² over its rows, approximately; an index counts as 1."""

    def power(self, name: str) -> float:
        """The sum of |x|² |e|² over its rows, approximately, for a weight; of |e|² for a bias."""
        if name not in self.layer.weights:
            return self.error_square
        return self.error_square * self.key_square / max(self.end - self.begin, 1)


class RowRun:
    """Rows of a layer in the form in which they are written to disk, call after call."""

    def __init__(
        self, layer: LayerInfo, columns: CertificateColumns, rows: int, dtype: torch.dtype, arena: SlotArena
    ) -> None:
        self.room, self.used = rows, 0
        self.kept = False
        """Whether a step has used some of its rows, which wait for their shard."""
        self.indexed = layer.indexed
        self.keys = arena.room((rows, layer.key_size), INDEX if layer.indexed else dtype)
        self.errors = arena.room((rows, layer.d_out), dtype) if layer.keep == "slots" else None
        self._key_exponents = np.zeros(rows, np.int16)
        self._error_exponents = np.zeros(rows, np.int16)
        self._key_columns = SideColumns(self.keys, columns.keys)
        self._error_columns = None if self.errors is None else SideColumns(self.errors, (columns.errors,))
        self._calls: list[weakref.ref[CallSlots]] = []

    def take(self, slots: CallSlots, key: Tensor, error: Tensor) -> list[RowTarget]:
        """Reserve rows for a call; returns what has to be copied, and where to."""
        begin, end = self.used, self.used + len(key)
        slots.run, slots.begin, slots.end = self, begin, end
        slots.eps = _eps(error.dtype) if self.indexed else max(_eps(key.dtype), _eps(error.dtype))
        self.used = end
        self._calls.append(weakref.ref(slots))
        targets, key_rows = [], self.keys.narrow(0, begin, len(key))
        if self.indexed:
            key_rows.copy_(key)
        else:
            targets.append(RowTarget(_on_cpu(key), key_rows, self._key_exponents[begin:end], False))
        if self.errors is not None:
            error_rows = self.errors.narrow(0, begin, len(key))
            targets.append(RowTarget(_on_cpu(error), error_rows, self._error_exponents[begin:end], True))
        return targets

    def unused(self) -> bool:
        """Whether its rows are needed no longer, because their passes never came to a step."""
        return not self.kept and not any(call() for call in self._calls)

    def clear(self) -> None:
        """Drop all rows, and fill the run from its beginning."""
        self._key_exponents[: self.used] = 0
        self.used, self._calls = 0, []

    def rows(self, begin: int, end: int) -> tuple[EncodedRows, EncodedRows | None]:
        """Keys and errors of a range of rows, encoded."""
        keys = _encoded(self.keys, self._key_exponents, begin, end)
        return keys, None if self.errors is None else _encoded(self.errors, self._error_exponents, begin, end)

    def follow(self, begin: int, end: int) -> None:
        """A range of rows has been encoded: copy the columns that the certificate needs while they are in the cache."""
        self._key_columns.take(begin, end)
        if self._error_columns is not None:
            self._error_columns.take(begin, end)

    def columns(self, rows: slice | np.ndarray) -> tuple["FollowedRows", "FollowedRows"]:
        """The followed columns of keys (or indices) and of errors, in their stored precision."""
        assert self._error_columns is not None
        return (
            FollowedRows(self._key_columns.rows(rows), _scale(self._key_exponents[rows])),
            FollowedRows(self._error_columns.rows(rows), _scale(self._error_exponents[rows])),
        )


class SideColumns:
    """Copies of some columns of a run, side by side; of all columns where no slices are named."""

    def __init__(self, values: Shaped[Tensor, "m d"], columns: Sequence[slice]) -> None:
        self._values, self._columns = values.numpy(), columns or (slice(0, values.shape[1]),)
        ends = [0, *np.cumsum(sizes_of(self._columns)).tolist()]
        self._places = [slice(*pair) for pair in pairwise(ends)]
        self._copies = np.empty((len(self._values), ends[-1]), self._values.dtype)

    def take(self, begin: int, end: int) -> None:
        """Copy the columns of a range of rows."""
        for place, columns in zip(self._places, self._columns, strict=True):
            self._copies[begin:end, place] = self._values[begin:end, columns]

    def rows(self, rows: slice | np.ndarray) -> Float[np.ndarray, "r k"]:
        """The copied columns of some rows, in float64."""
        return torch.from_numpy(self._copies[rows]).double().numpy()


class FollowedRows(NamedTuple):
    """Some columns of some rows, and the factor of each row."""

    values: Float[np.ndarray, "r k"]
    scale: Float[np.ndarray, " r"]


def _scale(exponents: Int[np.ndarray, " r"]) -> Float[np.ndarray, " r"]:
    return np.ldexp(1.0, exponents)


class SlotBuffer:
    """The run that a layer fills. A new run has room for as many rows as the last shard had, so that one is enough."""

    def __init__(self, layer: LayerInfo, columns: CertificateColumns, dtype: DType, rows: int) -> None:
        self.layer, self.columns, self.dtype = layer, columns, STORED[dtype]
        self.row_bytes = bytes_a_row(layer, self.dtype)
        self.run: RowRun | None = None
        self._expected, self._taken = rows, 0
        self._shard: tuple[SlotArena, int] | None = None

    def take(self, slots: CallSlots, key: Tensor, error: Tensor, arena: SlotArena) -> list[RowTarget]:
        """Reserve rows for a call; returns what has to be copied, and where to."""
        if self._shard != (arena, arena.clears):
            self._begin_shard(arena)
        run = self.run
        self._taken += len(key)
        if run is None or run.used + len(key) > run.room:
            run = self.run = self._next_run(len(key), arena)
        return run.take(slots, key, error)

    def _begin_shard(self, arena: SlotArena) -> None:
        """These are the first rows of another shard: they need a new run."""
        self._shard, self.run = (arena, arena.clears), None
        if self._taken:
            self._expected, self._taken = self._taken, 0

    def _next_run(self, rows: int, arena: SlotArena) -> RowRun:
        if self.run is not None and rows <= self.run.room and self.run.unused():
            self.run.clear()
            return self.run
        room = min(max(MIN_ROWS, self._expected + self._expected // 8), MAX_ROWS)
        return RowRun(self.layer, self.columns, max(rows, room), self.dtype, arena)


@cache
def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _on_cpu(rows: Tensor) -> Tensor:
    """Bring rows to the CPU, in float32 or float64."""
    return rows if rows.dtype in (torch.float32, torch.float64) and rows.is_cpu else rows.float().cpu()


def _encoded(values: Tensor, exponents: np.ndarray, begin: int, end: int) -> EncodedRows:
    row_exponents = exponents[begin:end]
    return EncodedRows(values[begin:end], torch.from_numpy(row_exponents) if row_exponents.any() else None)
