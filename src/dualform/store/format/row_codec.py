"""How numbers are kept: as they are (float64, float32), or in half the space (float16 with a power of two a row)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.types import DType

STORED: dict[DType, torch.dtype] = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
COMPUTED: dict[DType, torch.dtype] = {"float16": torch.float32, "float32": torch.float32, "float64": torch.float64}

SMALL, HUGE = -6, 15
"""Keys are kept as they are where the sizes of all rows lie between these powers of two; else each row gets its own."""

TINY = 1e-15
"""Smaller norms may have lost squares."""


class EncodedRows(NamedTuple):
    """Rows as they go to the disk: row i stands for ``values[i] * 2.0**exponents[i]`` (no exponents: all are 0)."""

    values: Shaped[Tensor, "m d"]
    exponents: Int[Tensor, " m"] | None


class RowTarget(NamedTuple):
    """Rows that are to be encoded, and where to. ``scaled`` rows (errors) always get their power of two in float16."""

    rows: Float[Tensor, "m d"]
    values: Shaped[Tensor, "m d"]
    exponents: Int[np.ndarray, " m"]
    scaled: bool


class RowStatistics(NamedTuple):
    """What was seen of rows on the way: whether all of them are finite, and about the sum of their squares."""

    finite: bool
    square: float


def encode(rows: Float[Tensor, "m d"], dtype: DType, *, scaled: bool) -> tuple[EncodedRows, bool]:
    """Rows in the stored precision, in memory of their own; also whether all of them are finite."""
    values, exponents = torch.empty(rows.shape, dtype=STORED[dtype]), np.zeros(len(rows), np.int16)
    ((finite, _),) = encode_into([RowTarget(rows.detach(), values, exponents, scaled)])
    needed = exponents.any() or (scaled and dtype == "float16")
    return EncodedRows(values, torch.from_numpy(exponents) if needed else None), finite


def encode_into(rooms: Sequence[RowTarget], desk: "EncodingWorkspace | None" = None) -> list[RowStatistics]:
    """Copy rows into the stored precision, and their powers of two where they get any.

    Backprop errors always get their power of two in float16, since late errors are tiny and would flush to zero; layer
    inputs only where they would overflow or lose digits. A power of two costs no precision.
    """
    if rooms[0].values.dtype != torch.float16 or not any(room.rows.numel() for room in rooms):
        for room in rooms:
            room.values.copy_(room.rows)
        return [_seen(room.rows) for room in rooms]
    squares = (desk or EncodingWorkspace()).encode(rooms)
    if squares is not None:
        return [RowStatistics(True, square) for square in squares]
    for room in rooms:
        _encode_any(room)
    return [_seen(room.rows) for room in rooms]


class WorkspacePart(NamedTuple):
    """The part of a desk for the rows of one room: their sizes, the powers of two of these, what takes those out."""

    sizes: Float[Tensor, " m"]
    powers: Int[np.ndarray, " m"]
    shifts: Float[Tensor, "m 1"]
    scaled: Float[Tensor, "m d"]


class EncodingWorkspace:
    """Where the rows of a pass are looked at, all of them in one go, and on the same desk again and again.

    In the middle of training nothing of this lies in the processor's caches: a call costs more than the numbers.
    """

    def __init__(self) -> None:
        self._shapes: list[torch.Size] = []

    def encode(self, rooms: Sequence[RowTarget]) -> list[float] | None:
        """Encode rows of single precision whose squares stay in its range; None if some are of another kind. Returns
        the sums of these squares.

        A size has its power of two in its upper bits; 127 stands for 2⁰ there.
        """
        if any(room.rows.dtype != torch.float32 or not len(room.rows) for room in rooms):
            return None
        shapes = [room.rows.shape for room in rooms]
        if shapes != self._shapes:
            self._lay_out(shapes)
        for room, place in zip(rooms, self._places, strict=True):
            torch.linalg.vector_norm(room.rows, dim=1, out=place.sizes)  # at most √d times the largest entry
        squares = np.add.reduceat(np.square(self._sizes, dtype=np.float64), self._begins).tolist()
        if not self._sizes.min() > TINY and not self._without_zeros(rooms):
            return None
        if not self._sizes.max() < np.inf:
            return None
        np.right_shift(self._sizes.view(np.int32), 23, out=self._powers)
        np.left_shift(257 - self._powers, 23, out=self._shifts)  # 257 = 127 + 127 + 3: sizes end up between 8 and 16
        for room, place in zip(rooms, self._places, strict=True):
            if not room.scaled and place.powers.min() >= SMALL + 127 and place.powers.max() < HUGE + 127:
                room.values.copy_(room.rows)
            else:
                np.subtract(place.powers, 130, out=room.exponents, casting="unsafe")
                room.values.copy_(torch.mul(room.rows, place.shifts, out=place.scaled))
        return squares

    def _without_zeros(self, rooms: Sequence[RowTarget]) -> bool:
        """Let rows of zeros count as rows of size 1; whether no other row is too small."""
        for room, place in zip(rooms, self._places, strict=True):
            zero = place.sizes == 0
            if bool(room.rows[zero].any()):
                return False
            place.sizes[zero] = 1.0
        return bool(self._sizes.min() > TINY)

    def _lay_out(self, shapes: list[torch.Size]) -> None:
        counts = [rows for rows, _ in shapes]
        sizes, shifts = torch.empty(sum(counts)), torch.empty(sum(counts))
        self._shapes, self._sizes, self._shifts = shapes, sizes.numpy(), shifts.numpy().view(np.int32)
        self._powers, self._begins = np.empty(sum(counts), np.int32), np.cumsum([0, *counts[:-1]])
        room = torch.empty(max(shape.numel() for shape in shapes))
        self._places = [
            WorkspacePart(own, powers, shift, room[: shape.numel()].view(shape))
            for own, powers, shift, shape in zip(
                sizes.split(counts),
                np.split(self._powers, np.cumsum(counts[:-1])),
                shifts.unsqueeze(1).split(counts),
                shapes,
                strict=True,
            )
        ]


def _encode_any(room: RowTarget) -> None:
    """Encode rows of any precision and size."""
    size = _largest(room.rows).numpy()
    if not room.scaled and bool(((size == 0) | ((size >= 2.0**SMALL) & (size < 2.0**HUGE))).all()):
        room.values.copy_(room.rows)
        return
    exponents = np.frexp(np.nan_to_num(size, posinf=0.0))[1] - 4
    with np.errstate(over="ignore"):
        shift = np.ldexp(np.ones((), size.dtype), -exponents)
    shift[shift == np.inf] = 0.0  # a row so small that its power of two overflows is kept as zeros
    room.exponents[:] = exponents
    room.values.copy_(room.rows * torch.from_numpy(shift).unsqueeze(1))


def _largest(rows: Float[Tensor, "m d"]) -> Float[Tensor, " m"]:
    return rows.abs().amax(1) if rows.numel() else rows.new_zeros(len(rows))


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite. A finite sum has finite terms; only an infinite one needs a look."""
    return math.isfinite(tensor.detach().sum()) or bool(torch.isfinite(tensor).all())


def square_of(rows: Shaped[Tensor, "..."]) -> float:
    """About the sum of the squares of all entries."""
    size = float(torch.linalg.vector_norm(rows.detach()))
    size = size if math.isfinite(size) else float(torch.linalg.vector_norm(rows.detach(), dtype=torch.float64))
    return size * size


def _seen(rows: Float[Tensor, "m d"]) -> RowStatistics:
    """One look for both: a finite sum of squares has finite terms."""
    square = square_of(rows)
    return RowStatistics(math.isfinite(square) or all_finite(rows), square)


def row_scale(exponents: Int[Tensor, " m"] | None, dtype: torch.dtype) -> Float[Tensor, " m"] | None:
    """The factor of each row, or None where all are 1."""
    return None if exponents is None else torch.exp2(exponents.to(dtype))
