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

SMALL, HUGE = 2.0**-6, 2.0**15
"""Keys are kept as they are where the norms of all rows lie between these; else each row gets a power of two."""


class Encoded(NamedTuple):
    """Rows as they go to the disk: row i stands for ``values[i] * 2.0**exponents[i]`` (no exponents: all are 0)."""

    values: Shaped[Tensor, "m d"]
    exponents: Int[Tensor, " m"] | None


class Room(NamedTuple):
    """Rows that are to be encoded, and where to. ``scaled`` rows (errors) always get their power of two in float16."""

    rows: Float[Tensor, "m d"]
    values: Shaped[Tensor, "m d"]
    exponents: Int[np.ndarray, " m"]
    scaled: bool


def encode(rows: Float[Tensor, "m d"], dtype: DType, *, scaled: bool) -> tuple[Encoded, bool]:
    """Rows in the stored precision, in memory of their own; also whether all of them are finite."""
    values, exponents = torch.empty(rows.shape, dtype=STORED[dtype]), np.zeros(len(rows), np.int16)
    (finite,) = encode_into([Room(rows.detach(), values, exponents, scaled)])
    needed = exponents.any() or (scaled and dtype == "float16")
    return Encoded(values, torch.from_numpy(exponents) if needed else None), finite


def encode_into(rooms: Sequence[Room]) -> list[bool]:
    """Copy rows into the stored precision, and their powers of two where they get any; returns which are finite.

    Backprop errors always get their power of two in float16, since late errors are tiny and would flush to zero; layer
    inputs only where they would overflow or lose digits. A power of two costs no precision. All sizes are looked at in
    one go: in the middle of training the first numpy call costs more than the numbers.
    """
    if rooms[0].values.dtype != torch.float16 or not any(room.rows.numel() for room in rooms):
        for room in rooms:
            room.values.copy_(room.rows)
        return [all_finite(room.rows) for room in rooms]
    norms = [torch.linalg.vector_norm(room.rows, dim=1) for room in rooms]  # at most √d times the largest entry
    sizes, finite = torch.cat(norms).numpy(), True
    if not 1e-15 < sizes.min() <= sizes.max() < np.inf:  # squares may have left the range
        sizes = torch.cat([_largest(room.rows) for room in rooms]).numpy()
        finite = bool(np.isfinite(sizes).all())
    exponents = np.frexp(sizes if finite else np.nan_to_num(sizes, posinf=0.0))[1] - 4  # rows stay below 16
    with np.errstate(over="ignore"):
        shift = np.ldexp(np.ones((), sizes.dtype), -exponents)
    shift[shift == np.inf] = 0.0  # a row so small that its power of two overflows is kept as zeros
    begin = 0
    for room in rooms:
        cut = slice(begin, begin + len(room.rows))
        begin = cut.stop
        if not room.scaled and _fits(sizes[cut]):
            room.values.copy_(room.rows)
            continue
        room.exponents[:] = exponents[cut]
        room.values.copy_(room.rows * torch.from_numpy(shift[cut]).unsqueeze(1))
    return [finite or all_finite(room.rows) for room in rooms]


def _fits(size: Float[np.ndarray, " m"]) -> bool:
    """Whether every row is zero or of a size that half precision keeps well."""
    if size.min() >= SMALL and size.max() < HUGE:
        return True
    return bool(((size == 0) | ((size >= SMALL) & (size < HUGE))).all())


def _largest(rows: Float[Tensor, "m d"]) -> Float[Tensor, " m"]:
    return rows.abs().amax(1) if rows.numel() else rows.new_zeros(len(rows))


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite. A finite sum has finite terms; only an infinite one needs a look."""
    return math.isfinite(tensor.detach().sum()) or bool(torch.isfinite(tensor).all())


def row_scale(exponents: Int[Tensor, " m"] | None, dtype: torch.dtype) -> Float[Tensor, " m"] | None:
    """The factor of each row, or None where all are 1."""
    return None if exponents is None else torch.exp2(exponents.to(dtype))
