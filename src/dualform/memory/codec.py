"""How numbers are kept: as they are (float64, float32), or in half the space (float16 with a power of two a row)."""

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


def encode(rows: Float[Tensor, "m d"], dtype: DType, *, scaled: bool) -> tuple[Encoded, bool]:
    """Rows in the stored precision, in memory of their own; also whether all of them are finite."""
    values, exponents = torch.empty(rows.shape, dtype=STORED[dtype]), np.zeros(len(rows), np.int16)
    finite = encode_into(values, exponents, rows.detach(), scaled=scaled)
    return Encoded(values, torch.from_numpy(exponents) if exponents.any() else None), finite


def encode_into(
    values: Shaped[Tensor, "m d"], exponents: Int[np.ndarray, " m"], rows: Float[Tensor, "m d"], *, scaled: bool
) -> bool:  # fmt: skip
    """Copy rows into the stored precision, and their powers of two if they get any; returns whether all are finite.

    ``scaled`` rows (backprop errors) always get their power of two in float16, since late errors are tiny and would
    flush to zero; others (layer inputs) only where they would overflow or lose digits. A power of two costs no
    precision.
    """
    if values.dtype != torch.float16 or not rows.numel():
        values.copy_(rows)
        return all_finite(rows)
    size = torch.linalg.vector_norm(rows, dim=1).numpy()  # at most √d times the largest entry, and cheaper
    if not scaled and ((size.min() >= SMALL and size.max() < HUGE) or _fits(size, rows)):
        values.copy_(rows)
        return True
    found, finite = _exponents(size, rows)
    exponents[:] = found
    with np.errstate(over="ignore"):
        shift = np.ldexp(np.ones((), size.dtype), -found)
    shift[~np.isfinite(shift)] = 0.0  # a row so small that its power of two overflows is kept as zeros
    torch.mul(rows, torch.from_numpy(shift).unsqueeze(1), out=values)
    return finite


def _fits(size: Float[np.ndarray, " m"], rows: Float[Tensor, "m d"]) -> bool:
    """Whether every row is zero or of a size that half precision keeps well."""
    zero = size == 0  # or so small that its squares vanish
    good = bool((zero | ((size >= SMALL) & (size < HUGE))).all())
    return good and not (bool(zero.any()) and bool(rows[torch.from_numpy(zero)].any()))


def _exponents(size: Float[np.ndarray, " m"], rows: Float[Tensor, "m d"]) -> tuple[Int[np.ndarray, " m"], bool]:
    """For each row a power of two near its size, such that it stays below 16; and whether all rows are finite."""
    if not 1e-15 < size.min() <= size.max() < np.inf:  # squares may have left the range
        size = rows.abs().amax(1).numpy()
        if not np.isfinite(size).all():
            return np.frexp(np.nan_to_num(size, posinf=0.0))[1] - 4, False
    return np.frexp(size)[1] - 4, True


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite. A finite sum has finite terms; only an infinite one needs a look."""
    return bool(torch.isfinite(tensor.detach().sum())) or bool(torch.isfinite(tensor).all())


def row_scale(exponents: Int[Tensor, " m"] | None, dtype: torch.dtype) -> Float[Tensor, " m"] | None:
    """The factor of each row, or None where all are 1."""
    return None if exponents is None else torch.exp2(exponents.to(dtype))
