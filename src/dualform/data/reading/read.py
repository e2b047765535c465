"""``dualform.data.read``: rows of a file, a DataFrame or a data set, as tensors that a network takes."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from dualform.errors import QueryError

from .columns import Columns
from .encode import encode, is_list, is_text, labels_of, learn_scale, learn_words, lists, padded
from .rows import DataRows
from .tables import READING_ERRORS, as_tensor, class_names, open_source, take
from .vocabulary import Vocabulary, load_vocabulary, padding_token

LABELS = ("label", "labels")
"""A column of one of these names is the label, unless another one is named."""


def read(
    source: Any,
    *,
    columns: Columns | str | Sequence[str] | None = None,
    label: str | None = None,
    categories: str | Sequence[str] = (),
    classes: Sequence[str] | None = None,
    scale: bool = False,
    tokens: Vocabulary | str | PathLike | None = None,
    length: int | None = None,
    rows: Sequence[int] | slice | None = None,
    also: Sequence[str] = (),
    learn: bool = True,
    dtype: torch.dtype | None = None,
) -> DataRows:
    """Read rows: ``train = dualform.data.read("train.csv", label="sick", categories=["sex"], scale=True)``.

    ``source`` is a file (.csv, .parquet, .npy, .npz, .safetensors), a folder that ``save_to_disk`` of the ``datasets``
    library wrote, a pandas DataFrame, a pyarrow Table or a ``datasets.Dataset``.

    - ``columns``: the input columns in order; by default all but the label. For an .npz or .safetensors the name of an
      array (default: ``inputs``, with ``labels`` beside). ``train.columns`` reads other rows as those were read: the
      same order, words and scale, nothing is learned from the new rows.
    - ``label``: the column of labels; by default ``label`` or ``labels``, if there is one. Words are numbered in the
      order of ``classes`` (default: sorted).
    - ``categories``: columns of words, or of numbers that are names. Each becomes one number for each of its words.
    - ``scale``: subtract the mean of each column of numbers and divide by its deviation.
    - ``tokens``: the vocabulary of a column of texts: ``"bytes"``, a .json or .txt list, a tokenizer.json. Texts are
      cut and padded to ``length`` tokens, by default padded to the longest one.
    - ``rows``: read only these. ``also``: further columns or arrays to return in ``others``.
    - ``learn=False``: raise an error where words of categories or labels would have to be learned from these rows.
    """
    known, names = columns if isinstance(columns, Columns) else None, None
    if not isinstance(columns, Columns | None):
        names = [columns] if isinstance(columns, str) else list(columns)
    categories = (categories,) if isinstance(categories, str) else tuple(categories)
    vocabulary = load_vocabulary(str(tokens)) if isinstance(tokens, str | PathLike) else tokens
    if not isinstance(vocabulary, Vocabulary | None):
        raise QueryError(
            f"tokens is a {type(tokens).__name__}: pass 'bytes', or the path of a list of tokens (.json, .txt) or of a "
            "tokenizer.json. A file can be found again by the commands."
        )
    where = str(source) if isinstance(source, str | Path) else f"this {type(source).__name__}"
    wanted = Columns() if known is None else known
    wanted = wanted.chosen(names, label, classes)
    try:
        data = open_source(source, {*wanted.categories, *categories})
        if isinstance(data, Mapping):
            if scale or categories:
                raise QueryError(f"scale and categories are for the columns of a table, and {where} holds arrays.")
            result = _arrays(data, wanted, rows, also, where)
        else:
            wanted = _settle(data, wanted, known, categories, scale, vocabulary, learn, also, where)
            result = _table(take(data, rows, where), wanted, vocabulary, length, also, dtype, where)
    except READING_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise QueryError(f"cannot read {where} as numbers: {reason}") from error
    named = os.fspath(tokens) if isinstance(tokens, str | PathLike) and result.vocabulary is not None else None
    return replace(result, source=Path(source) if isinstance(source, str | Path) else None, tokens=named)


def _arrays(data: Mapping[str, Any], wanted: Columns, rows: Any, also: Sequence[str], where: str) -> DataRows:
    names = list(data)
    name = wanted.names[0] if len(wanted.names) == 1 else None
    if name is None:
        name = "inputs" if "inputs" in names else names[0] if len(names) == 1 else None
    elif "" in data:
        name = ""  # a file of one array without a name
    if name is None or name not in names or len(wanted.names) > 1:
        reason = f"has no '{', '.join(wanted.names)}'" if wanted.names else "holds more than one array"
        raise QueryError(f"{where} {reason}: choose one of {names} with columns (--columns).")
    label = wanted.label if wanted.label is not None else "labels" if name == "inputs" else None
    if wanted.label is not None and label not in names:
        raise QueryError(f"{where} has no '{label}' for the labels: it has {names}.")
    labels = as_tensor(take(data[label](), rows, where)) if label is not None and label in names else None
    others = {key: as_tensor(take(data[key](), rows, where)) for key in also if key in names and key != name}
    chosen = replace(wanted, names=() if name in ("", "inputs") else (name,))
    return DataRows(as_tensor(take(data[name](), rows, where)), labels, None if chosen == Columns() else chosen, others)


def _settle(
    table: pa.Table, wanted: Columns, known: Columns | None, categories: tuple[str, ...], scale: bool,
    vocabulary: Vocabulary | None, learn: bool, also: Sequence[str], where: str,
) -> Columns:  # fmt: skip
    """The columns with all that was left open: names, label, words, classes and scale."""
    available = table.column_names
    label = wanted.label
    if label is None:
        label = next((name for name in LABELS if name in available and name not in wanted.names), None)
    optional = known is not None and label == known.label  # rows without labels can be asked about, too
    named = [*wanted.names, *categories, *([] if label is None or optional else [label])]
    for name in named:
        if name not in available:
            raise QueryError(f"{where} has no column '{name}': its columns are {available}.")
    names = wanted.names or tuple(name for name in available if name != label and name not in also)
    if vocabulary is not None and not wanted.names:
        names = _text_column(table, names, where)
    words = dict(wanted.categories)
    for name in names:
        is_words = name in categories or pa.types.is_dictionary(table.schema.field(name).type)
        if is_words and name not in words:
            if not learn:
                raise QueryError(
                    f"which words the category '{name}' has is learned from the training examples: give these, too."
                )
            words[name] = learn_words(table, name)
    words = {name: words[name] for name in names if name in words}
    numbers = [name for name in names if name not in words]
    text = vocabulary is not None and len(names) == 1 and is_text(table, names[0])
    scales = {name: pair for name, pair in wanted.scale.items() if name in numbers}
    if scale and known is None and not text:
        scales = learn_scale(table, numbers)
    classes = wanted.classes
    if label is not None and label in available and not classes:
        classes = class_names(table, label)
        if is_text(table, label) and not classes:
            if not learn:
                raise QueryError(
                    f"the label '{label}' holds words: name the classes in the order of the network's outputs, with "
                    "classes (--classes)."
                )
            classes = learn_words(table, label)
    return Columns(tuple(names), label, words, classes, scales)


def _text_column(table: pa.Table, names: Sequence[str], where: str) -> tuple[str, ...]:
    """The one column that holds texts, or tokens."""
    texts = [name for name in names if is_text(table, name)] or [name for name in names if is_list(table, name)]
    if len(texts) > 1:
        raise QueryError(f"{where} has several columns of text, {texts}: choose one with columns (--columns).")
    return tuple(texts) or tuple(names)


def _table(
    table: pa.Table, columns: Columns, vocabulary: Vocabulary | None, length: int | None, also: Sequence[str],
    dtype: torch.dtype | None, where: str,
) -> DataRows:  # fmt: skip
    dtype = dtype or torch.get_default_dtype()
    others = {name: lists(table, name, dtype)[0] for name in also if name in table.column_names}
    labels = labels_of(table, columns) if columns.label in table.column_names else None
    if len(columns.names) == 1:
        (name,) = columns.names
        if vocabulary is not None and is_text(table, name) and name not in columns.categories:
            inputs, padding = _tokens(table[name].to_pylist(), vocabulary, length, name)
            return DataRows(inputs, labels, columns, {"padding": padding, **others}, vocabulary=vocabulary)
        if is_list(table, name):
            inputs, padding = lists(table, name, dtype)
            paddings: dict[str, Tensor] = {} if padding is None else {"padding": padding}
            return DataRows(inputs, labels, columns, {**paddings, **others}, vocabulary=vocabulary)
    if not columns.names:
        raise QueryError(f"{where} has no column besides the label '{columns.label}'.")
    integers = all(pa.types.is_integer(table.schema.field(name).type) for name in columns.names)
    plain = integers and not columns.categories and not columns.scale
    return DataRows(
        encode(table, columns, dtype), labels, columns, others, features=columns.features, integers=plain
    )  # fmt: skip


def _tokens(
    texts: Sequence[str | None], vocabulary: Vocabulary, length: int | None, name: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    for row, text in enumerate(texts):
        if text is None:
            raise QueryError(f"column '{name}' has no text in row {row}. Fill it, or leave the row out.")
    ids = [vocabulary.encode(text)[:length] for text in texts if text is not None]
    return padded(ids, torch.int64, padding_token(vocabulary), length)
