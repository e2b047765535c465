"""Where copies of inputs and errors wait to be encoded: a few thousand rows of each layer, one below the other."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.memory import STORED, Arena, Encoded, encode_into
from dualform.types import DType, LayerInfo

from .gradients import Entries
from .notes import Batch

ROWS, BYTES = 1024, 12 << 20
"""A stage has room for so many rows, and all stages are emptied when they hold so many bytes."""


class Slots:
    """The slots of one call: where their copies lie, and once encoded what goes to the disk."""

    __slots__ = ("batch", "begin", "end", "eps", "layer", "leading", "module", "number", "run", "sheet")

    def __init__(self, layer: LayerInfo, module: str, leading: tuple[int, ...], batch: Batch, number: int) -> None:
        self.layer, self.module, self.batch, self.number = layer, module, batch, number
        self.leading = leading or (1,)  # a single row counts as a batch of one
        self.sheet: Sheet
        self.run: Run
        self.begin = self.end = 0
        self.eps = 0.0


class Run:
    """A sheet as it goes to the disk. Exponents are there once a row needs one."""

    def __init__(self, keys: Tensor, errors: Tensor | None) -> None:
        self.keys, self.errors = keys, errors
        self.key_exponents: np.ndarray | None = None
        self.error_exponents: np.ndarray | None = None
        self.finite = True

    def fill(self, sheet: "Sheet") -> None:
        """Encode a sheet."""
        cut = slice(0, sheet.used)
        self.key_exponents, self.finite = encode_into(self.keys, sheet.keys[cut], scaled=False)
        if self.errors is not None:
            self.error_exponents, good = encode_into(self.errors, sheet.errors[cut], scaled=True)
            self.finite = self.finite and good

    def is_finite(self, cut: slice) -> bool:
        """Whether some rows are finite."""
        rows = [t[cut] for t in (self.keys, self.errors) if t is not None]
        return self.finite or all(bool(torch.isfinite(t).all()) for t in rows)

    def key_columns(self, which: np.ndarray) -> np.ndarray:
        """Some columns of the keys as they are stored, in float64."""
        return _columns(self.keys, self.key_exponents, which)

    def error_columns(self, which: np.ndarray) -> np.ndarray:
        """Some columns of the errors as they are stored, in float64."""
        assert self.errors is not None
        return _columns(self.errors, self.error_exponents, which)

    def rows(self, cut: slice) -> tuple[Encoded, Encoded | None]:
        """Some rows as they go to the disk."""

        def some(values: Tensor, exponents: np.ndarray | None) -> Encoded:
            return Encoded(values[cut], None if exponents is None else torch.from_numpy(exponents[cut]))

        errors = None if self.errors is None else some(self.errors, self.error_exponents)
        return some(self.keys, self.key_exponents), errors


@dataclass
class Sheet:
    """Rows of keys and errors, filled from the top."""

    keys: Tensor
    errors: Tensor
    used: int = 0


class Stage:
    """The copies of one layer."""

    def __init__(self, layer: LayerInfo) -> None:
        self.layer = layer
        self.sheets: list[Sheet] = []
        self.slots: list[Slots] = []

    def put(self, slots: Slots, key: Tensor, error: Tensor) -> int:
        """Copy the rows of a call; returns how many bytes that took."""
        rows = key.numel() // key.shape[-1]
        sheet = self._sheet(rows, torch.promote_types(key.dtype, torch.float32))
        slots.sheet, slots.begin, slots.end = sheet, sheet.used, sheet.used + rows
        sheet.used += rows
        cut = slice(slots.begin, slots.end)
        sheet.keys[cut].copy_(key.reshape(rows, -1))
        sheet.errors[cut].copy_(error.detach().reshape(rows, -1))
        slots.eps = max(torch.finfo(key.dtype).eps, torch.finfo(error.dtype).eps)
        self.slots.append(slots)
        return rows * (self.layer.d_in + self.layer.d_out) * sheet.keys.element_size()

    def _sheet(self, rows: int, dtype: torch.dtype) -> Sheet:
        if self.sheets:
            last = self.sheets[-1]
            if last.used + rows <= len(last.keys) and last.keys.dtype == dtype:
                return last
        size = max(ROWS, rows)
        fresh = Sheet(torch.empty(size, self.layer.d_in, dtype=dtype), torch.empty(size, self.layer.d_out, dtype=dtype))
        self.sheets.append(fresh)
        return fresh

    def products(self, entries: Entries) -> tuple[np.ndarray, np.ndarray]:
        """For each call the watched entries of EᵀX, and the size of the terms that they are added up from."""
        found = []
        for sheet in filter(_used, self.sheets):
            begins = [slots.begin for slots in self.slots if slots.sheet is sheet]
            e = sheet.errors.numpy()[: sheet.used, entries.rows].astype(np.float64)
            x = (
                None
                if entries.columns is None
                else sheet.keys.numpy()[: sheet.used, entries.columns].astype(np.float64)
            )
            with np.errstate(invalid="ignore", over="ignore"):  # a step that is skipped may hold infinities
                terms = e if x is None else (e[:, :, None] * x[:, None, :]).reshape(len(e), -1)
                found.append((np.add.reduceat(terms, begins), np.add.reduceat(np.abs(terms), begins)))
        totals, sizes = zip(*found, strict=True)
        return np.concatenate(totals), np.concatenate(sizes)

    def encode(self, dtype: DType, arena: Arena) -> None:
        """Turn all copies into what goes to the disk (and spoil them)."""
        for sheet in filter(_used, self.sheets):
            run = self._run(sheet.used, STORED[dtype], arena)
            run.fill(sheet)
            for slots in self.slots:
                if slots.sheet is sheet:
                    slots.run = run

    def _run(self, rows: int, dtype: torch.dtype, arena: Arena) -> "Run":
        keep = self.layer.keep == "slots"
        errors = arena.room((rows, self.layer.d_out), dtype) if keep else None
        return Run(arena.room((rows, self.layer.d_in), dtype), errors)

    def clear(self) -> None:
        """Use the first sheet again, forget the others."""
        self.slots, self.sheets = [], self.sheets[:1]
        for sheet in self.sheets:
            sheet.used = 0


def _used(sheet: Sheet) -> bool:
    return sheet.used > 0


def _columns(values: Tensor, exponents: np.ndarray | None, which: np.ndarray) -> np.ndarray:
    found = values[:, torch.from_numpy(which)].double().numpy()
    return found if exponents is None else np.ldexp(found, exponents[:, None])
