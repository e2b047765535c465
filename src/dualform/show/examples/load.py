"""Examples by name: a file of arrays, or a factory that gives them. Nothing is ever unpickled."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import QueryError

from ..factory import call, is_name
from ..inputs import as_inputs, as_others, beside, read_arrays
from .examples import Examples, IndexableRows
from .vocabulary import Vocabulary

HOW = (
    "Give rows as the model takes them: a file (.npy, .npz, .safetensors, .csv, .parquet), or package.module:factory "
    "that gives a tensor, a pair (inputs, labels), a data set of such pairs, or arrays by name (inputs, labels, …)."
)


def load_examples(
    name: str, model: nn.Module, *, key: str | None = None, vocabulary: Vocabulary | None = None, length: int = 100
) -> Examples:
    """The examples of a file, or what a factory gives.

    Of several arrays ``inputs`` (or ``key``) are the model's first argument; ``labels`` are theirs; others go to the
    model's arguments of their names.
    """
    made = is_name(name) and not Path(name).exists()
    found = call(name, "the data") if made else read_arrays(Path(name), key, beside(model))
    inputs, labels = _pair(found, name)
    others = as_others({each: found[each] for each in beside(model) if each in found} if _by_name(found) else {}, model)
    for each, values in others.items():
        if len(values) != len(inputs):
            raise QueryError(f"'{name}' holds {len(inputs):,} inputs, but {len(values):,} rows of '{each}'.")
    if isinstance(inputs, Tensor):
        inputs = as_inputs(inputs, model)
    examples = Examples(inputs, labels, vocabulary, length, others=others)
    if not len(examples):
        raise QueryError(f"'{name}' holds no example. {HOW}")
    return replace(examples, series=is_series(examples.shape, others, model))


def is_series(shape: Sequence[int], others: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Whether an example of a shape is (time, channels): its rows can be padded, or the model takes them one by one.

    Without padding a square is a picture: some networks read pictures row by row.
    """
    if len(shape) != 2:
        return False
    if "padding" in others or shape[0] == shape[1]:
        return "padding" in others
    sizes = (getattr(each, name, None) for each in model.modules() for name in SIZES)
    return next((size for size in sizes if isinstance(size, int)), None) == shape[1]


SIZES = ("in_features", "input_size", "in_channels")
"""What layers call the numbers of a row that they take."""


def _pair(found: Any, name: str) -> tuple[IndexableRows, Any]:
    """Inputs and labels in whatever was given."""
    if _by_name(found):
        return _rows(found["inputs"]), found.get("labels")
    if isinstance(found, tuple | list) and len(found) == 2 and hasattr(found[0], "__getitem__"):
        return _rows(found[0]), found[1]
    if isinstance(found, Tensor) or hasattr(found, "__array__"):
        return _rows(found), None
    if not isinstance(found, tuple | list | dict) and isinstance(found, IndexableRows) and len(found):
        first = found[0]
        pairs = isinstance(first, tuple | list) and len(first) == 2
        return found, _Labels(found) if pairs else None
    raise QueryError(f"'{name}' gave a {type(found).__name__}, which holds no examples. {HOW}")


def _by_name(found: Any) -> bool:
    return isinstance(found, Mapping) and "inputs" in found


def _rows(value: Any) -> IndexableRows:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


class _Labels:
    """The second of each pair of a data set."""

    def __init__(self, pairs: IndexableRows) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, row: int) -> Any:
        return self._pairs[row][1]
