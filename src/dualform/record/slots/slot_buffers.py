"""Where slots wait for their step: copies of inputs and errors, in the precision of the memory, as they come.

They are encoded right after the backward pass, while they still lie in the processor's cache: later they would have to
be fetched from memory a second time.
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
"""What is written at a time."""

FEWEST, MOST = 64, 1 << 15
"""Rows that a run has room for."""


class CallSlots:
    """The slots of one call, and where they lie."""

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
        """Which call of its module it was in that."""
        self.place: tuple[str, int] = module, 0
        """Which of the maps that the call of a module went through, with the module's first name."""
        self.run: RowRun
        self.begin = self.end = 0
        self.eps = 0.0
        self.finite = True
        self.key_square = self.error_square = 0.0
        """About the sums of |x|² and of |e|² over its rows; indices count as 1 each."""

    def power(self, name: str) -> float:
        """About the sum of |x|² |e|² over its rows, as the gradient of a parameter has it; of |e|² for a bias."""
        if name not in self.layer.weights:
            return self.error_square
        return self.error_square * self.key_square / max(self.end - self.begin, 1)


class RowRun:
    """Rows of a layer as they go to the disk, one call below the other."""

    def __init__(
        self, layer: LayerInfo, columns: CertificateColumns, rows: int, dtype: torch.dtype, arena: SlotArena
    ) -> None:
        self.room, self.used = rows, 0
        self.kept = False
        """Whether some of its rows belong to a step and wait for their shard."""
        self.indexed = layer.indexed
        self.keys = arena.room((rows, layer.key_size), INDEX if layer.indexed else dtype)
        self.errors = arena.room((rows, layer.d_out), dtype) if layer.keep == "slots" else None
        self._key_exponents = np.zeros(rows, np.int16)
        self._error_exponents = np.zeros(rows, np.int16)
        self._key_columns = SideColumns(self.keys, columns.keys)
        self._error_columns = None if self.errors is None else SideColumns(self.errors, (columns.errors,))
        self._users: list[weakref.ref[CallSlots]] = []

    def take(self, slots: CallSlots, key: Tensor, error: Tensor) -> list[RowTarget]:
        """Make room for the rows of a call: what is to be copied, and where to."""
        begin, end = self.used, self.used + len(key)
        slots.run, slots.begin, slots.end = self, begin, end
        slots.eps = _eps(error.dtype) if self.indexed else max(_eps(key.dtype), _eps(error.dtype))
        self.used = end
        self._users.append(weakref.ref(slots))
        rooms, place = [], self.keys.narrow(0, begin, len(key))
        if self.indexed:
            place.copy_(key)
        else:
            rooms.append(RowTarget(_plain(key), place, self._key_exponents[begin:end], False))
        if self.errors is not None:
            rooms.append(
                RowTarget(_plain(error), self.errors.narrow(0, begin, len(key)), self._error_exponents[begin:end], True)
            )
        return rooms

    def forgotten(self) -> bool:
        """Whether nobody needs its rows any more: their passes never came to a step."""
        return not self.kept and not any(user() for user in self._users)

    def clear(self) -> None:
        """Begin again from the top."""
        self._key_exponents[: self.used] = 0
        self.used, self._users = 0, []

    def rows(self, begin: int, end: int) -> tuple[EncodedRows, EncodedRows | None]:
        """Some rows as they go to the disk."""
        keys = _encoded(self.keys, self._key_exponents, begin, end)
        return keys, None if self.errors is None else _encoded(self.errors, self._error_exponents, begin, end)

    def follow(self, begin: int, end: int) -> None:
        """Some rows have been encoded: take the columns that the certificate needs while they are at hand."""
        self._key_columns.take(begin, end)
        if self._error_columns is not None:
            self._error_columns.take(begin, end)

    def columns(self, rows: slice | np.ndarray) -> tuple["FollowedRows", "FollowedRows"]:
        """The followed columns of some keys (or the indices) and errors, as they are stored."""
        assert self._error_columns is not None
        return (
            FollowedRows(self._key_columns.of(rows), _scale(self._key_exponents[rows])),
            FollowedRows(self._error_columns.of(rows), _scale(self._error_exponents[rows])),
        )


class SideColumns:
    """Some columns of a run, beside the run; all of them where none are named."""

    def __init__(self, values: Shaped[Tensor, "m d"], which: Sequence[slice]) -> None:
        self._all, self._which = values.numpy(), which or (slice(0, values.shape[1]),)
        sizes = [0, *np.cumsum(sizes_of(self._which)).tolist()]
        self._places = [slice(*pair) for pair in pairwise(sizes)]
        self._some = np.empty((len(self._all), sizes[-1]), self._all.dtype)

    def take(self, begin: int, end: int) -> None:
        """Copy those of some rows."""
        for place, which in zip(self._places, self._which, strict=True):
            self._some[begin:end, place] = self._all[begin:end, which]

    def of(self, rows: slice | np.ndarray) -> Float[np.ndarray, "r k"]:
        """Those of some rows, in float64."""
        return torch.from_numpy(self._some[rows]).double().numpy()


class FollowedRows(NamedTuple):
    """Some columns of some rows, and what each row is to be multiplied with."""

    values: Float[np.ndarray, "r k"]
    scale: Float[np.ndarray, " r"]


def _scale(exponents: Int[np.ndarray, " r"]) -> Float[np.ndarray, " r"]:
    return np.ldexp(1.0, exponents)


class SlotBuffer:
    """The run that a layer is filling. Best if one run holds all rows of a shard: so many as the last one had."""

    def __init__(self, layer: LayerInfo, columns: CertificateColumns, dtype: DType, rows: int) -> None:
        self.layer, self.columns, self.dtype = layer, columns, STORED[dtype]
        self.row_bytes = bytes_a_row(layer, self.dtype)
        self.run: RowRun | None = None
        self._expected, self._taken = rows, 0

    def renew(self) -> None:
        """A new shard begins."""
        if self._taken:
            self._expected, self._taken = self._taken, 0
        self.run = None

    def take(self, slots: CallSlots, key: Tensor, error: Tensor, arena: SlotArena) -> list[RowTarget]:
        """Make room for the rows of a call: what is to be copied, and where to."""
        run = self.run
        self._taken += len(key)
        if run is None or run.used + len(key) > run.room:
            run = self.run = self._next(len(key), arena)
        return run.take(slots, key, error)

    def _next(self, rows: int, arena: SlotArena) -> RowRun:
        if self.run is not None and rows <= self.run.room and self.run.forgotten():
            self.run.clear()
            return self.run
        room = min(max(FEWEST, self._expected + self._expected // 8), MOST)
        return RowRun(self.layer, self.columns, max(rows, room), self.dtype, arena)


@cache
def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _plain(rows: Tensor) -> Tensor:
    """In memory, and precise enough to compute with."""
    return rows if rows.dtype in (torch.float32, torch.float64) and rows.is_cpu else rows.float().cpu()


def _encoded(values: Tensor, exponents: np.ndarray, begin: int, end: int) -> EncodedRows:
    some = exponents[begin:end]
    return EncodedRows(values[begin:end], torch.from_numpy(some) if some.any() else None)
