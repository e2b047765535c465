"""Examples from a file of arrays, or from a factory. Nothing is ever unpickled."""

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

FORMS = (
    "Give rows as the model takes them: a file (.npy, .npz, .safetensors, .csv, .parquet), or package.module:factory "
    "that returns a tensor, a pair (inputs, labels), a data set of such pairs, or a mapping (inputs, labels, …)."
)


def load_examples(
    name: str, model: nn.Module, *, key: str | None = None, vocabulary: Vocabulary | None = None, length: int = 100
) -> Examples:
    """Load the examples of a file, or those that a factory returns.

    If there are several arrays, ``inputs`` (or ``key``) is the model's first argument, ``labels`` its labels, and the
    others go to the model's arguments of the same names.
    """
    is_factory = is_name(name) and not Path(name).exists()
    arrays = call(name, "the data") if is_factory else read_arrays(Path(name), key, beside(model))
    inputs, labels = _inputs_and_labels(arrays, name)
    named_inputs = as_others(
        {argument: arrays[argument] for argument in beside(model) if argument in arrays} if _has_inputs(arrays) else {},
        model,
    )
    for argument, values in named_inputs.items():
        if len(values) != len(inputs):
            raise QueryError(f"'{name}' holds {len(inputs):,} inputs, but {len(values):,} rows of '{argument}'.")
    if isinstance(inputs, Tensor):
        inputs = as_inputs(inputs, model)
    examples = Examples(inputs, labels, vocabulary, length, others=named_inputs)
    if not len(examples):
        raise QueryError(f"'{name}' holds no example. {FORMS}")
    return replace(examples, series=is_series(examples.shape, named_inputs, model))


def is_series(shape: Sequence[int], named_inputs: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Whether examples are series (time, channels): they have padding, or the model takes one row at a time.

    A square without padding is a picture: some networks read pictures row by row.
    """
    if len(shape) != 2:
        return False
    if "padding" in named_inputs or shape[0] == shape[1]:
        return "padding" in named_inputs
    sizes = (getattr(module, name, None) for module in model.modules() for name in SIZES)
    return next((size for size in sizes if isinstance(size, int)), None) == shape[1]


SIZES = ("in_features", "input_size", "in_channels")
"""Attributes in which layers store the width of a row."""


def _inputs_and_labels(data: Any, name: str) -> tuple[IndexableRows, Any]:
    """The inputs and labels in a mapping, a pair, a tensor, or a data set."""
    if _has_inputs(data):
        return _rows(data["inputs"]), data.get("labels")
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "__getitem__"):
        return _rows(data[0]), data[1]
    if isinstance(data, Tensor) or hasattr(data, "__array__"):
        return _rows(data), None
    if not isinstance(data, tuple | list | dict) and isinstance(data, IndexableRows) and len(data):
        first = data[0]
        pairs = isinstance(first, tuple | list) and len(first) == 2
        return data, _Labels(data) if pairs else None
    raise QueryError(f"'{name}' returned a {type(data).__name__}, which holds no examples. {FORMS}")


def _has_inputs(data: Any) -> bool:
    return isinstance(data, Mapping) and "inputs" in data


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
