"""Columns of a table to tensors: numbers, words of categories, labels, lists."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from dualform.errors import QueryError

from .columns import Columns


def encode(table: pa.Table, columns: Columns, dtype: torch.dtype) -> Float[Tensor, "n d"]:
    """The input columns side by side, in order: numbers (scaled), and one number for each word of a category."""
    parts = []
    for name in columns.names:
        if name in columns.categories:
            numbers = _word_numbers(table, name, columns.categories[name], "category")
            parts.append(torch.nn.functional.one_hot(numbers, len(columns.categories[name])).to(torch.float64))
        else:
            mean, deviation = columns.scale.get(name, (0.0, 1.0))
            parts.append(((numbers_of(table, name) - mean) / deviation).unsqueeze(1))
    return torch.cat(parts, 1).to(dtype)


def labels_of(table: pa.Table, columns: Columns) -> Shaped[Tensor, " n"]:
    """The labels: class numbers for words and whole numbers, else floating point numbers."""
    name = columns.label
    assert name is not None
    if is_text(table, name):
        return _word_numbers(table, name, columns.classes, "label")
    kind = table.schema.field(name).type
    numbers = numbers_of(table, name)
    whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    return numbers.long() if whole else numbers.to(torch.get_default_dtype())


def learn_words(table: pa.Table, name: str) -> tuple[str, ...]:
    """The words of a column: those of a pandas category in its order, else sorted."""
    column = table[name]
    if pa.types.is_dictionary(column.type) and column.num_chunks:
        return tuple(str(word) for word in column.unify_dictionaries().chunk(0).dictionary.to_pylist())
    return tuple(sorted({str(word) for word in table[name].to_pylist() if word is not None}))


def learn_scale(table: pa.Table, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The mean and the deviation of each column; a column that is constant gets the deviation 1."""
    values = {name: numbers_of(table, name) for name in names}
    return {
        name: (float(v.mean()), float(v.std(correction=0)) or 1.0) if len(v) else (0.0, 1.0)
        for name, v in values.items()
    }


def numbers_of(table: pa.Table, name: str) -> Float[Tensor, " n"]:
    """A column of numbers, as it is; an error that says what to do if it holds anything else."""
    kind = table.schema.field(name).type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
            or pa.types.is_decimal(kind)):  # fmt: skip
        example = next((value for value in table[name].to_pylist() if value is not None), None)
        if is_text(table, name):
            raise QueryError(
                f"column '{name}' holds words, such as {_short(example)}: name it in categories (--categories), leave "
                "it out with columns (--columns), or give tokens (--tokens) if it is the text to read."
            )
        raise QueryError(
            f"column '{name}' holds values of type {kind}, such as {_short(example)}, which are not numbers: leave it "
            "out with columns (--columns)."
        )
    values = table[name].cast(pa.float64()).to_numpy().astype(np.float64)  # a missing value becomes NaN
    _require_values(table, name, np.isnan(values))
    return torch.from_numpy(values)


def is_text(table: pa.Table, name: str) -> bool:
    """Whether a column holds words or texts."""
    kind = table.schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_list(table: pa.Table, name: str) -> bool:
    """Whether a column holds a list in each row."""
    kind = table.schema.field(name).type
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def lists(
    table: pa.Table, name: str, dtype: torch.dtype
) -> tuple[Shaped[Tensor, "n ..."], Bool[Tensor, "n m"] | None]:  # fmt: skip
    """A column as an array with one row a row, and the padding of lists of different lengths (else None)."""
    if not is_list(table, name):
        return numbers_of(table, name).to(dtype), None
    _require_values(table, name)
    rows = table[name].to_pylist()
    flat = len({len(row) for row in rows}) > 1
    try:
        values = np.concatenate([np.asarray(row) for row in rows]) if flat else np.array(rows)
    except ValueError as error:
        raise QueryError(f"column '{name}' holds lists of different shapes: {error}.") from error
    if values.dtype.kind not in "biuf":
        raise QueryError(f"column '{name}' holds lists of {values.dtype}, not of numbers: leave it out with --columns.")
    kind = dtype if values.dtype.kind == "f" else torch.bool if values.dtype.kind == "b" else torch.int64
    if not flat:
        return torch.from_numpy(values).to(kind), None
    return padded(rows, kind, 0, None)


def padded(
    rows: Sequence[Sequence[float]], dtype: torch.dtype, filler: int, length: int | None
) -> tuple[Shaped[Tensor, "n m"], Bool[Tensor, "n m"]]:
    """Rows of different lengths, filled up to ``length`` or the longest, and where they are filled."""
    width = length or max(map(len, rows), default=0)
    values, padding = (
        torch.full((len(rows), width), filler, dtype=dtype),
        torch.ones(len(rows), width, dtype=torch.bool),
    )
    for number, row in enumerate(rows):
        values[number, : len(row)] = torch.tensor(row, dtype=dtype)
        padding[number, : len(row)] = False
    return values, padding


def _word_numbers(table: pa.Table, name: str, words: Sequence[str], role: str) -> Shaped[Tensor, " n"]:
    _require_values(table, name)
    numbers = {word: number for number, word in enumerate(words)}
    values = [str(value) for value in table[name].to_pylist()]
    for row, value in enumerate(values):
        if value not in numbers:
            shown = ", ".join(map(repr, words[:8])) + (", …" if len(words) > 8 else "")
            raise QueryError(f"the {role} '{name}' is {_short(value)} in row {row}, which is not one of {shown}.")
    return torch.tensor([numbers[value] for value in values], dtype=torch.int64)


def _require_values(table: pa.Table, name: str, absent: np.ndarray | None = None) -> None:
    absences = table[name].is_null().to_numpy() if absent is None else absent
    if missing := int(np.count_nonzero(absences)):
        row = int(np.argmax(absences))
        raise QueryError(
            f"column '{name}' has no value in {missing:,} of {len(table):,} rows (the first is row {row}): fill them, "
            "or leave the column out with columns (--columns)."
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 30 else text[:29] + "…"
