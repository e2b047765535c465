"""Examples by name: a file of arrays, or a factory that gives them. Nothing is ever unpickled."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import QueryError

from ..factory import call, is_name
from ..inputs import as_inputs, read_arrays
from .examples import Examples, Rows
from .vocabulary import Vocabulary

HOW = (
    "Give rows as the model takes them: a file (.npy, .npz, .safetensors, .csv, .parquet), or package.module:factory "
    "that gives a tensor, a pair (inputs, labels), or a data set of such pairs."
)


def load_examples(
    name: str, model: nn.Module, *, key: str | None = None, vocabulary: Vocabulary | None = None, length: int = 100
) -> Examples:
    """The examples of a file (its arrays ``inputs`` and ``labels``, or ``key``), or what a factory gives."""
    found = call(name, "the data") if is_name(name) and not Path(name).exists() else read_arrays(Path(name), key)
    inputs, labels = _pair(found, name)
    if isinstance(inputs, Tensor):
        inputs = as_inputs(inputs, model)
    examples = Examples(inputs, labels, vocabulary, length)
    if not len(examples):
        raise QueryError(f"'{name}' holds no example. {HOW}")
    return examples


def _pair(found: Any, name: str) -> tuple[Rows, Any]:
    """Inputs and labels in whatever was given."""
    if isinstance(found, tuple | list) and len(found) == 2 and hasattr(found[0], "__getitem__"):
        return _rows(found[0]), found[1]
    if isinstance(found, Tensor) or hasattr(found, "__array__"):
        return _rows(found), None
    if not isinstance(found, tuple | list) and isinstance(found, Rows) and len(found):
        first = found[0]
        pairs = isinstance(first, tuple | list) and len(first) == 2
        return found, _Labels(found) if pairs else None
    raise QueryError(f"'{name}' gave a {type(found).__name__}, which holds no examples. {HOW}")


def _rows(value: Any) -> Rows:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


class _Labels:
    """The second of each pair of a data set."""

    def __init__(self, pairs: Rows) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, row: int) -> Any:
        return self._pairs[row][1]
