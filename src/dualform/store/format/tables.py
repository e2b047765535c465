"""The lines of the tables of a memory, and their conversion to Arrow tables for Parquet.

Columns are built from raw bytes: ``pa.array`` would first import pandas, which would stop the training loop for a third
of a second.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from dualform.types import Transition

SETTING = "opt_"
"""The prefix of the columns of optimiser settings in the table of steps."""


class CallRow(NamedTuple):
    """A line of the table of calls: the slots of one call of a module in one backward pass."""

    layer: str
    module: str
    step: int
    call: int
    rows: int
    visit: int
    batch: int
    stride: int
    factor: float
    bias_factor: float


class ParameterStep(NamedTuple):
    """A line of the table of steps: what one step did to one parameter."""

    parameter: str
    transition: Transition | None
    scale: float
    settings: Mapping[str, float]
    sample: bytes
    state_sample: bytes
    gradient_eps: float = 0.0
    """The machine precision of the gradient."""


_UNKNOWN = Transition(*[np.nan] * len(Transition._fields))


def calls_table(calls: Sequence[CallRow]) -> pa.Table:
    """The table of calls, with one line for each call."""
    columns = list(zip(*calls, strict=True)) if calls else [() for _ in CallRow._fields]
    kinds = [CallRow.__annotations__[name] for name in CallRow._fields]
    return columns_table({
        name: _text(column) if kind is str else number_column(np.array(column, np.int64 if kind is int else np.float64))
        for name, kind, column in zip(CallRow._fields, kinds, columns, strict=True)
    })  # fmt: skip


def steps_table(lines: Sequence[tuple[int, ParameterStep]]) -> pa.Table:
    """The table of steps, with one line for each step and parameter; settings that a parameter lacks are NaN."""
    steps, changes = [step for step, _ in lines], [line for _, line in lines]
    numbers = rows_of([line.transition or _UNKNOWN for line in changes], Transition._fields, getattr)
    names = sorted(set().union(*{id(line.settings): line.settings for line in changes}.values()))
    settings = rows_of([line.settings for line in changes], names, lambda settings, name: settings.get(name, np.nan))
    columns = {
        "step": number_column(np.array(steps, np.int64)),
        "parameter": _text([line.parameter for line in changes]),
    }
    columns |= {name: number_column(numbers[:, i]) for i, name in enumerate(Transition._fields)}
    columns["scale"] = number_column(np.array([line.scale for line in changes], np.float64))
    columns |= {f"{SETTING}{name}": number_column(settings[:, i]) for i, name in enumerate(names)}
    columns["gradient_eps"] = number_column(np.array([line.gradient_eps for line in changes], np.float64))
    columns["sample"] = _bytes([line.sample for line in changes])
    columns["state_sample"] = _bytes([line.state_sample for line in changes])
    return columns_table(columns)


def rows_of(
    records: Sequence[Any], names: Sequence[str], get: Callable[[Any, str], float]
) -> Float[np.ndarray, "m k"]:  # fmt: skip
    """The named numbers of each record, one row for each. Most records are one and the same object."""
    places = {id(record): i for i, record in enumerate(records)}
    distinct = {place: i for i, place in enumerate(places.values())}
    rows = [[get(records[place], name) for name in names] for place in distinct]
    row_numbers = np.array([distinct[places[id(record)]] for record in records], np.int64)
    return np.array(rows, np.float64).reshape(len(rows), len(names))[row_numbers]


def visits_table(visits: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The table of visits of all batches; a single value in a column stands for every example of its batch."""
    sizes = [len(line["visit"]) for line in visits]
    columns = {}
    for name in visits[0]:
        values = [line[name] for line in visits]
        arrays = [v if isinstance(v, np.ndarray) else np.full(n, v) for v, n in zip(values, sizes, strict=True)]
        column = np.concatenate(arrays)
        columns[name] = (
            number_column(column)
            if column.dtype in _PLAIN
            else _text(column.tolist())
            if column.dtype.kind == "U"
            else pa.array(column)
        )
    return columns_table(columns)


_BINARY = pa.binary()
_PLAIN = {np.dtype(kind): pa.from_numpy_dtype(kind) for kind in (np.int64, np.float64)}


def columns_table(columns: Mapping[str, pa.Array]) -> pa.Table:
    """A table of named columns."""
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def number_column(values: np.ndarray) -> pa.Array:
    """A column of int64 or float64 numbers."""
    return pa.Array.from_buffers(_PLAIN[values.dtype], len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _text(values: Sequence[str]) -> pa.Array:
    return _bytes([value.encode() for value in values], pa.string())


def _bytes(values: Sequence[bytes], kind: pa.DataType = _BINARY) -> pa.Array:
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))])
