"""Encoding rows of numbers: unchanged (float64, float32), or as float16 with one power of two for each row."""

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
"""Keys have no powers of two if the norms of all rows lie between these two; otherwise each row gets its own."""

TINY = 1e-15
"""Below this norm, squares of entries may have underflowed."""


class EncodedRows(NamedTuple):
    """Encoded rows: row i is ``values[i] * 2.0**exponents[i]`` (without exponents, all of them are 0)."""

    values: Shaped[Tensor, "m d"]
    exponents: Int[Tensor, " m"] | None


class RowTarget(NamedTuple):
    """Rows to encode, and where to write them. ``scaled`` rows (errors) always get powers of two in float16."""

    rows: Float[Tensor, "m d"]
    values: Shaped[Tensor, "m d"]
    exponents: Int[np.ndarray, " m"]
    scaled: bool


class RowStatistics(NamedTuple):
    """Whether all entries are finite, and approximately the sum of their squares."""

    finite: bool
    square: float


def encode(rows: Float[Tensor, "m d"], dtype: DType, *, scaled: bool) -> tuple[EncodedRows, bool]:
    """Encode rows into new memory; also returns whether all of them are finite."""
    values, exponents = torch.empty(rows.shape, dtype=STORED[dtype]), np.zeros(len(rows), np.int16)
    ((finite, _),) = encode_into([RowTarget(rows.detach(), values, exponents, scaled)])
    needed = exponents.any() or (scaled and dtype == "float16")
    return EncodedRows(values, torch.from_numpy(exponents) if needed else None), finite


def encode_into(targets: Sequence[RowTarget], workspace: "EncodingWorkspace | None" = None) -> list[RowStatistics]:
    """Write rows in the stored precision, with their powers of two where they get any.

    In float16 backprop errors always get powers of two, since late errors are tiny and would flush to zero; layer
    inputs get them only where they would overflow or lose digits. A power of two costs no precision.
    """
    if targets[0].values.dtype != torch.float16 or not any(target.rows.numel() for target in targets):
        for target in targets:
            target.values.copy_(target.rows)
        return [_statistics(target.rows) for target in targets]
    squares = (workspace or EncodingWorkspace()).encode(targets)
    if squares is not None:
        return [RowStatistics(True, square) for square in squares]
    for target in targets:
        _encode_any(target)
    return [_statistics(target.rows) for target in targets]


class WorkspacePart(NamedTuple):
    """The part of a workspace for one target: norms of rows, their exponents, scale factors and scaled rows."""

    sizes: Float[Tensor, " m"]
    powers: Int[np.ndarray, " m"]
    shifts: Float[Tensor, "m 1"]
    scaled: Float[Tensor, "m d"]


class EncodingWorkspace:
    """Buffers for encoding all rows of a backward pass at once; they are reused from pass to pass.

    In the middle of training none of this is in the CPU caches, so a call costs more than its arithmetic.
    """

    def __init__(self) -> None:
        self._shapes: list[torch.Size] = []

    def encode(self, targets: Sequence[RowTarget]) -> list[float] | None:
        """Encode float32 rows whose squares stay in the range of float32; returns the sums of these squares.

        Returns None, without writing anything, if some rows are of another kind. The exponent of a norm is in its
        upper bits, where 127 means 2⁰.
        """
        if any(target.rows.dtype != torch.float32 or not len(target.rows) for target in targets):
            return None
        shapes = [target.rows.shape for target in targets]
        if shapes != self._shapes:
            self._lay_out(shapes)
        for target, part in zip(targets, self._parts, strict=True):
            torch.linalg.vector_norm(target.rows, dim=1, out=part.sizes)  # at most √d times the largest entry
        squares = np.add.reduceat(np.square(self._sizes, dtype=np.float64), self._begins).tolist()
        if not self._sizes.min() > TINY and not self._without_zeros(targets):
            return None
        if not self._sizes.max() < np.inf:
            return None
        np.right_shift(self._sizes.view(np.int32), 23, out=self._powers)
        np.left_shift(257 - self._powers, 23, out=self._shifts)  # 257 = 127 + 127 + 3: norms end up between 8 and 16
        for target, part in zip(targets, self._parts, strict=True):
            if not target.scaled and part.powers.min() >= SMALL + 127 and part.powers.max() < HUGE + 127:
                target.values.copy_(target.rows)
            else:
                np.subtract(part.powers, 130, out=target.exponents, casting="unsafe")
                target.values.copy_(torch.mul(target.rows, part.shifts, out=part.scaled))
        return squares

    def _without_zeros(self, targets: Sequence[RowTarget]) -> bool:
        """Give rows of zeros the norm 1; returns whether no other row is too small."""
        for target, part in zip(targets, self._parts, strict=True):
            zero = part.sizes == 0
            if bool(target.rows[zero].any()):
                return False
            part.sizes[zero] = 1.0
        return bool(self._sizes.min() > TINY)

    def _lay_out(self, shapes: list[torch.Size]) -> None:
        counts = [rows for rows, _ in shapes]
        sizes, shifts = torch.empty(sum(counts)), torch.empty(sum(counts))
        self._shapes, self._sizes, self._shifts = shapes, sizes.numpy(), shifts.numpy().view(np.int32)
        self._powers, self._begins = np.empty(sum(counts), np.int32), np.cumsum([0, *counts[:-1]])
        scaled_rows = torch.empty(max(shape.numel() for shape in shapes))
        self._parts = [
            WorkspacePart(norms, powers, shift, scaled_rows[: shape.numel()].view(shape))
            for norms, powers, shift, shape in zip(
                sizes.split(counts),
                np.split(self._powers, np.cumsum(counts[:-1])),
                shifts.unsqueeze(1).split(counts),
                shapes,
                strict=True,
            )
        ]


def _encode_any(target: RowTarget) -> None:
    """Encode rows of any precision and magnitude."""
    size = _largest(target.rows).numpy()
    if not target.scaled and bool(((size == 0) | ((size >= 2.0**SMALL) & (size < 2.0**HUGE))).all()):
        target.values.copy_(target.rows)
        return
    exponents = np.frexp(np.nan_to_num(size, posinf=0.0))[1] - 4
    with np.errstate(over="ignore"):
        shift = np.ldexp(np.ones((), size.dtype), -exponents)
    shift[shift == np.inf] = 0.0  # a row so small that its power of two overflows is kept as zeros
    target.exponents[:] = exponents
    target.values.copy_(target.rows * torch.from_numpy(shift).unsqueeze(1))


def _largest(rows: Float[Tensor, "m d"]) -> Float[Tensor, " m"]:
    return rows.abs().amax(1) if rows.numel() else rows.new_zeros(len(rows))


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite. A finite sum has finite terms; only an infinite sum needs a second look."""
    return math.isfinite(tensor.detach().sum()) or bool(torch.isfinite(tensor).all())


def square_of(rows: Shaped[Tensor, "..."]) -> float:
    """Approximately the sum of the squares of all entries."""
    size = float(torch.linalg.vector_norm(rows.detach()))
    size = size if math.isfinite(size) else float(torch.linalg.vector_norm(rows.detach(), dtype=torch.float64))
    return size * size


def _statistics(rows: Float[Tensor, "m d"]) -> RowStatistics:
    """Both statistics from one pass: a finite sum of squares has finite terms."""
    square = square_of(rows)
    return RowStatistics(math.isfinite(square) or all_finite(rows), square)


def row_scale(exponents: Int[Tensor, " m"] | None, dtype: torch.dtype) -> Float[Tensor, " m"] | None:
    """The factor of each row; None if all are 1."""
    return None if exponents is None else torch.exp2(exponents.to(dtype))
