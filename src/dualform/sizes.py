"""Sizes in bytes: read from a text such as "2 GB", and written with their unit."""

import math
import re
from collections.abc import Iterable
from contextlib import suppress

from torch import Tensor

from dualform.errors import QueryError


def bytes_of(name: str, value: object) -> int:
    """The bytes that a size stands for: a whole number of bytes, or a text such as "2 GB" or "500 MB"."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([kMGT]?)B\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    if match is not None:
        with suppress(ValueError):
            return int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise QueryError(f'{name}={value!r} is no number of bytes; write for example {name}="2 GB" or {name}="500 MB".')


def in_bytes(size: float | int) -> str:
    """A size with its unit: "813 kB"."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    power = min(len(units) - 1, int(math.log10(max(size, 1.0)) // 3))
    number = size / 1000**power
    return f"{number:.3g} {units[power]}" if number < 999.5 else f"{number:,.0f} {units[power]}"


def bytes_of_tensors(tensors: Iterable[Tensor]) -> int:
    """The bytes that the numbers of some tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
