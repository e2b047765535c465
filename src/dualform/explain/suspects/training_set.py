"""The training set that a question is about: its rows, their labels, and the visits of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dualform.errors import QueryError
from dualform.store import Store

from ..groups import require_column
from ..query import first_axis

BATCH = 256
"""How many examples the network sees at a time."""


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """Inputs and labels, row by row, and the row that each visit of a memory saw (−1: none of them)."""

    inputs: Any
    labels: Int[Tensor, " n"]
    index: Int[np.ndarray, " n"]
    row_of_visit: Int[np.ndarray, " V1"]
    """The last entry is for visits that are not known."""

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def visits(self) -> Int[Tensor, " n"]:
        """How often training saw each row."""
        rows = self.row_of_visit[self.row_of_visit >= 0]
        return torch.from_numpy(np.bincount(rows, minlength=len(self)))

    def batches(self) -> Iterator[tuple[slice, Any]]:
        """The inputs, some rows at a time."""
        for begin in range(0, len(self), BATCH):
            rows = slice(begin, min(begin + BATCH, len(self)))
            yield rows, _rows_of(self.inputs, rows)


def training_set(
    store: Store, shown: Bool[np.ndarray, " V"], inputs: Any, labels: Any, index: Sequence[int] | Tensor | None,
    column: str,
) -> TrainingSet:  # fmt: skip
    """Match rows of inputs with the shown visits through a noted column of indices."""
    require_column(store.visits, column)
    classes = _classes(labels)
    n = first_axis(inputs)
    if len(classes) != n:
        raise QueryError(f"x holds {n:,} examples and y {len(classes):,} labels: give one label an example.")
    rows = np.arange(n) if index is None else _whole_numbers(index, n)
    noted = store.visits[column]
    if noted.null_count == len(noted):
        raise QueryError(f"the column '{column}' is empty: note the index of each training example while recording.")
    values = noted.fill_null(-1).to_numpy()
    if not np.issubdtype(values.dtype, np.integer):
        raise QueryError(f"the column '{column}' holds {values.dtype}; examples are matched by whole numbers.")
    order = np.argsort(rows, kind="stable")
    place = np.searchsorted(rows[order], values).clip(max=n - 1)
    matches = rows[order][place] == values
    foreign = shown & ~matches & (values >= 0)
    if foreign.any():
        raise QueryError(
            f"training saw example {values[foreign][0]}, which is not among the {n:,} rows of x. Pass all training "
            "examples in the order of their index, or index= with the index of each row."
        )
    row_of_visit = np.where(matches & shown, order[place], -1)
    if not (row_of_visit >= 0).any():
        raise QueryError("none of these examples was seen in training, up to this step and through this mask.")
    return TrainingSet(inputs, classes, rows, np.append(row_of_visit, -1))


def _classes(labels: Any) -> Int[Tensor, " n"]:
    tensor = torch.as_tensor(labels).detach().cpu()
    if tensor.ndim != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise QueryError(
            f"y holds {tensor.dtype} of shape {tuple(tensor.shape)}: suspects are about labels that are classes, one "
            "whole number an example. Targets of a regression, several labels an example and labels of tokens are not "
            "supported."
        )
    return tensor.long()


def _whole_numbers(index: Sequence[int] | Tensor, n: int) -> Int[np.ndarray, " n"]:
    numbers = np.asarray(index)
    if numbers.shape != (n,) or not np.issubdtype(numbers.dtype, np.integer) or len(np.unique(numbers)) < n:
        raise QueryError(f"index holds {numbers.dtype} of shape {numbers.shape}; give {n:,} different whole numbers.")
    return numbers.astype(np.int64)


def _rows_of(inputs: Any, rows: slice) -> Any:
    """Some rows of a tensor, or of every tensor in a tuple or mapping."""
    if isinstance(inputs, Mapping):
        return {name: _rows_of(values, rows) for name, values in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_rows_of(values, rows) for values in inputs)
    return inputs[rows]
