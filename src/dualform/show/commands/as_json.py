"""Answers as JSON, for programs that read what a command prints."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import typer
from torch import Tensor

PLAIN = (bool, int, float, str)


def print_json(value: Any) -> None:
    """Print one JSON document, and nothing else, on standard output."""
    typer.echo(json.dumps(as_json(value), indent=2, ensure_ascii=False, allow_nan=False))


def as_json(value: Any) -> Any:
    """Anything that holds answers, as what JSON can hold.

    An answer (any dataclass with ``to_pandas``) gives its plain fields, such as the layer and the target, and
    ``rows``: its table, one object a line. Other dataclasses give their fields. Infinity and NaN become null.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Tensor() | np.ndarray() | np.generic():
            return as_json(value.tolist())
        case pa.Table():
            return as_json(value.to_pylist())
        case _ if hasattr(value, "to_pandas"):
            return {**_plain_fields(value), "rows": _rows(value.to_pandas())}
        case Mapping():
            return {_key(name): as_json(part) for name, part in value.items()}
        case list() | tuple() | set() | frozenset():
            return [as_json(part) for part in value]
        case _ if is_dataclass(value):
            return {part.name: as_json(getattr(value, part.name)) for part in fields(value)}
        case _:
            return str(value)


def _plain_fields(answer: Any) -> dict[str, Any]:
    """The fields of an answer that are numbers or text: what its table is about."""
    if not is_dataclass(answer):
        return {}
    values = {part.name: getattr(answer, part.name) for part in fields(answer)}
    return {name: as_json(value) for name, value in values.items() if value is None or isinstance(value, PLAIN)}


def _rows(frame: Any) -> list[dict[str, Any]]:
    """The lines of a DataFrame. An index with a name is a column too; missing values are null."""
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    columns = [_key(name) for name in frame.columns]
    lines = zip(*(frame.iloc[:, place].tolist() for place in range(len(columns))), strict=True)
    return [{name: _cell(cell) for name, cell in zip(columns, line, strict=True)} for line in lines]


def _cell(cell: Any) -> Any:
    """One value of a table: pandas has objects of its own for what is missing."""
    return None if type(cell).__name__ in ("NAType", "NaTType") else as_json(cell)


def _key(name: Any) -> str:
    """A name as a key of an object; the parts of a name with several are joined."""
    if name is None:
        return "unknown"
    return "/".join(map(str, name)) if isinstance(name, tuple) else str(name)
