"""Examples from a file, a table, a data set, or a factory. Nothing is ever unpickled."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualform.data import Columns, DataRows, Vocabulary, read
from dualform.errors import QueryError
from dualform.store import is_factory_name

from ..factory import call
from ..inputs import as_inputs, as_others, beside
from .examples import Examples, IndexableRows

FORMS = (
    "Give a file (.csv, .parquet, .npy, .npz, .safetensors), the folder of a saved data set, or package.module:factory "
    "that returns a tensor, a pair (inputs, labels), a data set of such pairs, a table, or a mapping (inputs, labels, "
    "…)."
)

LENGTH = 100
"""Tokens per example where the data is one long text, unless another length is given."""


def load_examples(
    source: Any,
    model: nn.Module,
    *,
    columns: Columns | Sequence[str] | None = None,
    label: str | None = None,
    categories: Sequence[str] = (),
    classes: Sequence[str] | None = None,
    vocabulary: Vocabulary | None = None,
    length: int | None = None,
    rows: Sequence[int] | slice | None = None,
    learn: bool = True,
) -> Examples:
    """Load the examples of a file or table, or those that a factory returns; the options are those of
    :func:`dualform.data.read`.

    If there are several arrays, ``inputs`` (or the one in ``columns``) is the model's first argument, ``labels`` its
    labels, and the others go to the model's arguments of the same names.
    """
    name = source if isinstance(source, str) else type(source).__name__
    data = source
    if isinstance(source, str) and is_factory_name(source) and not Path(source).exists():
        data = call(source, "the data")
    read_rows = None
    if isinstance(data, str | Path) or _is_table(data):
        read_rows = rows if _is_table(data) else None
        data = read(
            data, columns=columns, label=label, categories=categories, classes=classes, tokens=vocabulary,
            length=length, rows=read_rows, also=beside(model), learn=learn, dtype=torch.float64,
        )  # fmt: skip
    examples = _of_rows(data, model) if isinstance(data, DataRows) else _of_arrays(data, name, model)
    examples = replace(examples, vocabulary=vocabulary or examples.vocabulary, length=length or LENGTH)
    for argument, values in examples.others.items():
        if len(values) != len(examples.inputs):
            raise QueryError(
                f"'{name}' holds {len(examples.inputs):,} inputs, but {len(values):,} rows of '{argument}'."
            )
    if not len(examples):
        raise QueryError(f"'{name}' holds no example. {FORMS}")
    if rows is not None and read_rows is None:
        examples = examples.only(rows)
    return replace(examples, series=is_series(examples.shape, examples.others, model))


def _of_rows(rows: DataRows, model: nn.Module) -> Examples:
    tokens = rows.integers and any(isinstance(module, nn.Embedding) for module in model.modules())
    inputs = as_inputs(rows.inputs.long() if tokens else rows.inputs, model)
    padding, names = rows.others.get("padding"), beside(model)
    others = {argument: rows.others[argument] for argument in names if argument in rows.others}
    if "attention_mask" in names and padding is not None:
        others.setdefault("attention_mask", (~padding.bool()).long())
    return Examples(
        inputs, rows.labels, rows.vocabulary, others=as_others(others, model), columns=rows.columns, padding=padding
    )  # fmt: skip


def _of_arrays(data: Any, name: str, model: nn.Module) -> Examples:
    inputs, labels = _inputs_and_labels(data, name)
    others = {argument: data[argument] for argument in beside(model) if argument in data} if _has_inputs(data) else {}
    inputs = as_inputs(inputs, model) if isinstance(inputs, Tensor) else inputs
    return Examples(inputs, labels, others=as_others(others, model))


def _is_table(data: Any) -> bool:
    """Whether data is a table: a file or folder of one, a DataFrame, a pyarrow Table, a ``datasets.Dataset``."""
    if isinstance(data, str | Path):
        return Path(data).suffix in (".csv", ".parquet") or Path(data).is_dir()
    return hasattr(data, "__dataframe__") or (hasattr(data, "with_format") and hasattr(data, "column_names"))


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
