"""The lines of a memory, and the Parquet tables they become.

Columns are made from their bytes: ``pa.array`` would first import pandas, which takes a third of a second out of the
training loop.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from dualform.types import Transition

SETTING = "opt_"
"""Before the names of the optimiser's settings in the table of steps."""


class CallRow(NamedTuple):
    """The slots of one call of one module in one backward pass, as a line of the table of calls."""

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
    """What one step did to one parameter."""

    parameter: str
    transition: Transition | None
    scale: float
    settings: Mapping[str, float]
    sample: bytes
    state_sample: bytes
    gradient_eps: float = 0.0
    """The machine precision in which its gradient was computed."""


_UNKNOWN = Transition(*[np.nan] * len(Transition._fields))


def calls_table(calls: Sequence[CallRow]) -> pa.Table:
    """One line a call."""
    columns = list(zip(*calls, strict=True)) if calls else [() for _ in CallRow._fields]
    kinds = [CallRow.__annotations__[name] for name in CallRow._fields]
    return _table({
        name: _text(column) if kind is str else _numbers(np.array(column, np.int64 if kind is int else np.float64))
        for name, kind, column in zip(CallRow._fields, kinds, columns, strict=True)
    })  # fmt: skip


def steps_table(lines: Sequence[tuple[int, ParameterStep]]) -> pa.Table:
    """One line a step and parameter. A setting that a parameter does not have is NaN."""
    steps, moves = [step for step, _ in lines], [line for _, line in lines]
    numbers = _rows([line.transition or _UNKNOWN for line in moves], Transition._fields, getattr)
    names = sorted(set().union(*{id(line.settings): line.settings for line in moves}.values()))
    settings = _rows([line.settings for line in moves], names, lambda settings, name: settings.get(name, np.nan))
    columns = {"step": _numbers(np.array(steps, np.int64)), "parameter": _text([line.parameter for line in moves])}
    columns |= {name: _numbers(numbers[:, i]) for i, name in enumerate(Transition._fields)}
    columns["scale"] = _numbers(np.array([line.scale for line in moves], np.float64))
    columns |= {f"{SETTING}{name}": _numbers(settings[:, i]) for i, name in enumerate(names)}
    columns["gradient_eps"] = _numbers(np.array([line.gradient_eps for line in moves], np.float64))
    columns["sample"] = _bytes([line.sample for line in moves])
    columns["state_sample"] = _bytes([line.state_sample for line in moves])
    return _table(columns)


def _rows(
    things: Sequence[Any], names: Sequence[str], get: Callable[[Any, str], float]
) -> Float[np.ndarray, "m k"]:  # fmt: skip
    """The named numbers of some things, one row each. Most of the things are one and the same."""
    places = {id(thing): i for i, thing in enumerate(things)}
    distinct = {place: i for i, place in enumerate(places.values())}
    rows = [[get(things[place], name) for name in names] for place in distinct]
    which = np.array([distinct[places[id(thing)]] for thing in things], np.int64)
    return np.array(rows, np.float64).reshape(len(rows), len(names))[which]


def visits_table(visits: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The visits of all batches as whole columns; a single value stands for every example of its batch."""
    sizes = [len(line["visit"]) for line in visits]
    columns = {}
    for name in visits[0]:
        values = [line[name] for line in visits]
        whole = [v if isinstance(v, np.ndarray) else np.full(n, v) for v, n in zip(values, sizes, strict=True)]
        column = np.concatenate(whole)
        columns[name] = (
            _numbers(column)
            if column.dtype in _PLAIN
            else _text(column.tolist())
            if column.dtype.kind == "U"
            else pa.array(column)
        )
    return _table(columns)


_BINARY = pa.binary()
_PLAIN = {np.dtype(kind): pa.from_numpy_dtype(kind) for kind in (np.int64, np.float64)}


def _table(columns: Mapping[str, pa.Array]) -> pa.Table:
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def _numbers(values: np.ndarray) -> pa.Array:
    return pa.Array.from_buffers(_PLAIN[values.dtype], len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _text(values: Sequence[str]) -> pa.Array:
    return _bytes([value.encode() for value in values], pa.string())


def _bytes(values: Sequence[bytes], kind: pa.DataType = _BINARY) -> pa.Array:
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))])
