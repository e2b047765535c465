"""Rows that a notebook holds as examples that the explorer shows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import QueryError

from ..examples import Examples, Vocabulary, is_series
from ..inputs import as_inputs, as_others, beside

FORMS = (
    "Give rows as the model takes them: a tensor or an array, a pair (inputs, labels), a data set of such pairs, or a "
    'mapping with "inputs", perhaps "labels", and further arguments of the model.'
)


def as_examples(data: Any, model: nn.Module, vocabulary: Vocabulary | None = None, length: int = 100) -> Examples:
    """Examples of a tensor, a pair, a data set or a mapping."""
    if isinstance(data, Examples):
        return data
    inputs, labels, further = _parts(data, model)
    if isinstance(inputs, Tensor):
        inputs = as_inputs(inputs, model)
    others = as_others(further, model)
    for argument, values in others.items():
        if len(values) != len(inputs):
            raise QueryError(f"there are {len(inputs):,} inputs, but {len(values):,} rows of '{argument}'.")
    examples = Examples(inputs, labels, vocabulary, length, others=others)
    if not len(examples):
        raise QueryError(f"there is no example in this {type(data).__name__}. {FORMS}")
    return Examples(inputs, labels, vocabulary, length, series=is_series(examples.shape, others, model), others=others)


def _parts(data: Any, model: nn.Module) -> tuple[Any, Any, dict[str, Any]]:
    """The inputs, the labels, and further arguments of the model."""
    if isinstance(data, Mapping) and "inputs" in data:
        further = {argument: data[argument] for argument in beside(model) if argument in data}
        return _rows(data["inputs"]), data.get("labels"), further
    if isinstance(data, tuple | list) and len(data) == 2 and all(hasattr(part, "__getitem__") for part in data):
        return _rows(data[0]), data[1], {}
    if isinstance(data, Tensor) or hasattr(data, "__array__"):
        return _rows(data), None, {}
    if not isinstance(data, Mapping | str) and hasattr(data, "__getitem__") and hasattr(data, "__len__") and len(data):
        first = data[0]
        if isinstance(first, tuple | list) and len(first) == 2:
            return data, [row[1] for row in (data[place] for place in range(len(data)))], {}
        return data, None, {}
    raise QueryError(f"a {type(data).__name__} holds no examples. {FORMS}")


def _rows(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)
