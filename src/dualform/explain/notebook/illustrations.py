"""What the training examples of a memory look like: pictures, passages or lines of a table, for the displays."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from dualform.errors import QueryError

from .markup import Markup, image
from .png import data_address

SAMPLE, WIDEST = 500, 96
"""How many pictures are looked at to find black and white, and the widest picture that is not made smaller."""

Kind = Literal["pictures", "passages", "table"]


@dataclass(frozen=True)
class Illustrations:
    """The looks of training examples, found by the index that was noted: a position, or a key of a mapping."""

    kind: Kind
    rows: Any

    def __post_init__(self) -> None:
        if not hasattr(self.rows, "__getitem__") or not hasattr(self.rows, "__len__"):
            raise QueryError(
                f"{self.kind}= takes something that is indexed like the training set, not a {type(self.rows).__name__}."
            )
        if self.kind == "pictures" and len(self.rows) and self.picture(self._first) is None:
            raise QueryError(
                "pictures= takes pictures of shape (height, width), (channels, height, width), (height, width, "
                f"channels) or of a flat square, not {tuple(_tensor(self._first).shape)}."
            )
        if self.kind == "passages" and len(self.rows) and not isinstance(self._first, str):
            raise QueryError(f"passages= takes texts, not a {type(self._first).__name__}.")

    def __getitem__(self, index: Any) -> Any:
        """The look of one example; None if there is none."""
        if isinstance(self.rows, Mapping):
            return self.rows.get(index)
        if hasattr(self.rows, "loc"):  # a DataFrame or a Series of pandas
            return self.rows.loc[index] if index in self.rows.index else None
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self.rows):
            return None
        return self.rows[index]

    def image_of(self, index: Any) -> Markup | None:
        """The picture of one example; None if there is none."""
        return None if self.kind != "pictures" or (row := self[index]) is None else self.image(row, f"example {index}")

    def image(self, row: Any, alt: str, shades: tuple[float, float] | None = None) -> Markup | None:
        """A row that looks like the pictures, as one; None if it does not. ``shades`` are black and white."""
        picture = self.picture(row, shades)
        return None if picture is None else image(data_address(picture), alt)

    def columns_of(self, index: Any) -> dict[str, Any]:
        """What a table says of an example besides what was noted; a passage is a column of its own."""
        row = None if self.kind == "pictures" else self[index]
        if row is None:
            return {}
        if self.kind == "passages":
            return {"passage": row}
        if hasattr(row, "to_dict"):
            row = row.to_dict()
        if isinstance(row, Mapping):
            return {str(name): value for name, value in row.items()}
        return {str(place): value for place, value in enumerate(np.asarray(row).reshape(-1).tolist())}

    def picture(
        self, row: Any, shades: tuple[float, float] | None = None
    ) -> UInt8[Tensor, "height width *channels"] | None:
        """A row as bytes, made smaller if it is large; None if it has no shape of a picture."""
        pixels = _channels_last(_tensor(row))
        if pixels is None:
            return None
        if pixels.dtype != torch.uint8:
            low, high = shades or self._range
            pixels = (255 * ((pixels.float() - low) / max(high - low, 1e-12)).clamp(0, 1)).round().to(torch.uint8)
        if (largest := max(pixels.shape[:2])) > WIDEST:
            size = [max(1, round(side * WIDEST / largest)) for side in pixels.shape[:2]]
            stacked = pixels.float().movedim(-1, 0)[None]
            pixels = torch.nn.functional.interpolate(stacked, size, mode="area")[0].movedim(0, -1).round().byte()
        return pixels[..., 0] if pixels.shape[-1] == 1 else pixels

    @cached_property
    def _first(self) -> Any:
        if isinstance(self.rows, Mapping):
            return next(iter(self.rows.values()))
        return self.rows.iloc[0] if hasattr(self.rows, "iloc") else self.rows[0]

    @cached_property
    def _range(self) -> tuple[float, float]:
        """The smallest and the largest number in a sample of the pictures."""
        if isinstance(self.rows, Mapping):
            sample = list(self.rows.values())[:SAMPLE]
        else:
            sample = [self.rows[place] for place in range(0, len(self.rows), max(1, len(self.rows) // SAMPLE))]
        tensors = [_tensor(row).float() for row in sample]
        return min(float(x.min()) for x in tensors), max(float(x.max()) for x in tensors)


_ILLUSTRATIONS: dict[str, Illustrations] = {}


def illustrate(folder: str, **rows: Any) -> None:
    """Remember in this process how the training examples of a memory look; nothing is written to disk."""
    given = {kind: value for kind, value in rows.items() if value is not None}
    if len(given) != 1:
        raise QueryError(f"give one of pictures=, passages= or table=, not {list(given) or 'none'}.")
    ((kind, value),) = given.items()
    _ILLUSTRATIONS[folder] = Illustrations(kind, value)  # pyright: ignore[reportArgumentType]


def illustrations_of(folder: str) -> Illustrations | None:
    """The looks of the training examples of a memory, if this process was told."""
    return _ILLUSTRATIONS.get(folder)


def _tensor(row: Any) -> Tensor:
    """A row as a tensor; of a pair (picture, label), the picture."""
    if isinstance(row, tuple | list) and len(row) == 2:
        row = row[0]
    return row.detach().cpu() if isinstance(row, Tensor) else torch.as_tensor(np.array(row))


def _channels_last(x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "height width channels"] | None:
    """A picture with one or three channels behind its pixels; None if it is none."""
    if x.ndim == 1:
        side = math.isqrt(len(x))
        return x.reshape(side, side, 1) if side > 1 and side * side == len(x) else None
    if x.ndim == 2:
        return x.unsqueeze(-1)
    if x.ndim == 3 and x.shape[0] in (1, 3):
        return x.movedim(0, -1)
    return x if x.ndim == 3 and x.shape[2] in (1, 3) else None
