"""How numbers are kept: as they are (float64, float32), or in half the space (float16 with a power of two a row)."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.types import DType

STORED: dict[DType, torch.dtype] = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
COMPUTED: dict[DType, torch.dtype] = {"float16": torch.float32, "float32": torch.float32, "float64": torch.float64}

SMALL, HUGE = 0x2400, 0x7800
"""The float16 patterns of 2⁻⁶ and 2¹⁵: keys whose largest entry lies between are kept as they are; others get a power
of two for each row."""


class Encoded(NamedTuple):
    """Rows as they go to the disk: row i stands for ``values[i] * 2.0**exponents[i]`` (no exponents: all are 0)."""

    values: Shaped[Tensor, "m d"]
    exponents: Int[Tensor, " m"] | None


def encode(rows: Float[Tensor, "m d"], dtype: DType, *, scaled: bool) -> tuple[Encoded, bool]:
    """Rows in the stored precision, in memory of their own; also whether all of them are finite."""
    values = torch.empty(rows.shape, dtype=STORED[dtype])
    exponents, finite = encode_into(values, rows.detach().clone(), scaled=scaled)
    return Encoded(values, None if exponents is None else torch.from_numpy(exponents)), finite


def encode_into(
    values: Shaped[Tensor, "m d"], rows: Float[Tensor, "m d"], *, scaled: bool
) -> tuple[Int[np.ndarray, " m"] | None, bool]:  # fmt: skip
    """Copy rows into the stored precision; returns their powers of two, if any, and whether all of them are finite.

    ``scaled`` rows (backprop errors) always get their power of two in float16, since late errors are tiny and would
    flush to zero; others (layer inputs) only where they would overflow or lose digits. A power of two costs no
    precision. Rows that get one are spoiled: they are multiplied where they lie.
    """
    if values.dtype != torch.float16 or not rows.numel():
        values.copy_(rows)
        return None, all_finite(rows)
    if not scaled:
        values.copy_(rows)
        largest = _largest_pattern(values)
        if SMALL <= largest < HUGE or largest == 0:
            return None, True
    exponents, finite = _exponents(rows)
    shift = np.ldexp(1.0, -exponents)
    shift[~np.isfinite(shift)] = 0.0  # a row so small that its power of two overflows is kept as zeros
    values.copy_(rows.mul_(torch.from_numpy(shift).to(rows.dtype).unsqueeze(1)))
    return exponents, finite


def _largest_pattern(values: Float[Tensor, "m d"]) -> int:
    """The bits of the largest absolute value, which order like the values themselves; infinity and NaN come last."""
    bits = values.numpy()
    return max(int(bits.view(np.int16).max()), int(bits.view(np.uint16).max()) & 0x7FFF)


def _exponents(rows: Float[Tensor, "m d"]) -> tuple[Int[np.ndarray, " m"], bool]:
    """For each row a power of two near its size, and whether all rows are finite.

    The norm is cheaper than the largest entry and at most √d times as large: a scaled row stays below 16, far from
    overflow.
    """
    size = torch.linalg.vector_norm(rows, dim=1).numpy()
    if not 1e-15 < float(size.min()) <= float(size.max()) < np.inf:  # squares may have left the range
        size = rows.abs().amax(1).numpy()
    finite = bool(np.isfinite(size).all())
    return np.frexp(size if finite else np.nan_to_num(size, posinf=0.0))[1].astype(np.int16) - np.int16(4), finite


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite. A finite sum has finite terms; only an infinite one needs a look."""
    return bool(torch.isfinite(tensor.detach().sum())) or bool(torch.isfinite(tensor).all())


def row_scale(exponents: Int[Tensor, " m"] | None, dtype: torch.dtype) -> Float[Tensor, " m"] | None:
    """The factor of each row, or None where all are 1."""
    return None if exponents is None else torch.exp2(exponents.to(dtype))
