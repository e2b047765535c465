"""Rows of a data file as inputs of a model. Nothing is ever unpickled."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dualform.errors import DataNotFound, QueryError

KINDS = (".npy", ".npz", ".csv", ".parquet", ".safetensors")


def read_rows(file: Path, rows: Sequence[int], key: str | None = None) -> Shaped[Tensor, "n ..."]:
    """Read rows of a file. ``key`` names the array of an .npz or .safetensors, or the columns of a table: ``"a,b"``."""
    if not file.is_file():
        raise DataNotFound(f"there is no file {file}. Give --data one of these kinds: {', '.join(KINDS)}.")
    if file.suffix not in READERS:
        raise QueryError(f"cannot read {file}: '{file.suffix}' is not one of {', '.join(KINDS)}.")
    try:
        data = READERS[file.suffix](file, key)
        _require_rows(file, rows, len(data))
        return _take_rows(data, rows)
    except (ValueError, OSError, pa.ArrowException, SafetensorError, TypeError) as error:
        raise QueryError(f"cannot read {file} as numbers: {str(error).strip().splitlines()[0]}") from error


def count_rows(file: Path, key: str | None = None) -> int:
    """The number of rows in a file."""
    arrays = read_arrays(file, key)
    return len(arrays["inputs"] if isinstance(arrays, Mapping) else arrays)


def read_arrays(file: Path, key: str | None = None, beside_names: Sequence[str] = ()) -> Any:
    """Read all rows of a file.

    If it holds ``inputs`` and no ``key`` is given, the result is a mapping: ``inputs``, ``labels`` and those of
    ``beside_names`` that the file holds.
    """
    if not file.is_file():
        raise DataNotFound(f"there is no file {file}. Give one of these kinds: {', '.join(KINDS)}.")
    if file.suffix not in READERS:
        raise QueryError(f"cannot read {file}: '{file.suffix}' is not one of {', '.join(KINDS)}.")
    try:
        names = _names(file)
        if key is None and "inputs" in names:
            wanted = [name for name in ("inputs", "labels", *beside_names) if name in names]
            return {name: _as_tensor(READERS[file.suffix](file, name)) for name in wanted}
        return _as_tensor(READERS[file.suffix](file, key))
    except (ValueError, OSError, pa.ArrowException, SafetensorError, TypeError) as error:
        raise QueryError(f"cannot read {file} as numbers: {str(error).strip().splitlines()[0]}") from error


def read_beside(file: Path, rows: Sequence[int], model: nn.Module) -> dict[str, Shaped[Tensor, "n ..."]]:
    """Read the same rows of the other arrays that both the file and the model's arguments name, such as ``padding``."""
    names = set(beside(model)) & set(_names(file))
    return as_others({name: read_rows(file, rows, name) for name in sorted(names)}, model)


def arguments(model: nn.Module) -> list[str]:
    """The names of a model's arguments."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name for parameter in inspect.signature(model.forward).parameters.values() if parameter.kind in kinds
    ]


def beside(model: nn.Module) -> list[str]:
    """The names of a model's arguments beside its inputs, without labels."""
    return [name for name in arguments(model)[1:] if name not in ("inputs", "labels")]


def _names(file: Path) -> list[str]:
    """The names of the arrays in a file that can hold several."""
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            return list(arrays.files)
    if file.suffix == ".safetensors":
        with safe_open(str(file), framework="pt") as tensors:
            return list(tensors.keys())
    return []


def _as_tensor(data: Any) -> Tensor:
    if isinstance(data, pa.Table):
        return torch.from_numpy(_stacked(data))
    if isinstance(data, np.ndarray) and not data.flags.writeable:  # memory-mapped
        data = np.array(data)
    return data if isinstance(data, Tensor) else torch.from_numpy(data)


def parse_rows(text: str) -> list[int]:
    """Parse row numbers: ``"0,3,5"``, and ``"10:14"`` for 10, 11, 12, 13."""
    try:
        rows: list[int] = []
        for part in text.split(","):
            first, colon, last = part.partition(":")
            rows += range(int(first or 0), int(last)) if colon else [int(part)]
    except ValueError as error:
        raise QueryError(f"cannot read the rows '{text}'. Write numbers and ranges, as in 0,3,5 or 10:14.") from error
    if not rows:
        raise QueryError(f"the rows '{text}' are empty. Write numbers and ranges, as in 0,3,5 or 10:14.")
    return rows


def as_inputs(data: Shaped[Tensor, "n ..."], model: nn.Module) -> Shaped[Tensor, "n ..."]:
    """Convert rows to the model's dtype. Integers stay integers if the model has an embedding: they are tokens."""
    tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    if tokens and not data.is_floating_point():
        return data.long()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    return data.to(dtype)


def as_others(values_by_name: Mapping[str, Any], model: nn.Module) -> dict[str, Shaped[Tensor, "n ..."]]:
    """Convert further inputs: floating point numbers to the model's dtype, masks and integers unchanged."""
    tensors = {
        name: values if isinstance(values, Tensor) else torch.as_tensor(values)
        for name, values in values_by_name.items()
    }
    return {
        name: as_inputs(values, model) if values.is_floating_point() else values for name, values in tensors.items()
    }


def together(x: Shaped[Tensor, "n ..."], named_inputs: Mapping[str, Tensor], model: nn.Module) -> Any:
    """The inputs in the form a model is called with: a tensor, or a mapping from argument names to tensors."""
    return {arguments(model)[0]: x, **named_inputs} if named_inputs else x


def _require_rows(file: Path, rows: Sequence[int], count: int) -> None:
    for row in rows:
        if not -count <= row < count:
            raise QueryError(f"{file} has no row {row}: it holds {count:,} rows, counted from 0.")


def _take_rows(data: Any, rows: Sequence[int]) -> Tensor:
    index = [row % len(data) for row in rows]
    if isinstance(data, pa.Table):
        return torch.from_numpy(_stacked(data.take(index)))
    if isinstance(data, Tensor):
        return data[index]
    array = np.asarray(data[index])
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))


def _stacked(table: pa.Table) -> np.ndarray:
    """Stack the columns side by side; a single column of lists is an array already."""
    columns = [np.array(table[name].to_pylist()) for name in table.column_names]
    for name, column in zip(table.column_names, columns, strict=True):
        if column.dtype.kind not in "biuf":
            raise QueryError(
                f"column '{name}' does not hold numbers. Name the columns that the model takes, as in --key a,b,c."
            )
    return columns[0] if len(columns) == 1 and columns[0].ndim > 1 else np.stack(columns, axis=1)


def _npy(file: Path, key: str | None) -> np.ndarray:
    return np.load(file, mmap_mode="r", allow_pickle=False)


def _npz(file: Path, key: str | None) -> np.ndarray:
    with np.load(file, allow_pickle=False) as arrays:
        return arrays[_key(file, key, arrays.files)]


def _safetensors(file: Path, key: str | None) -> Tensor:
    with safe_open(str(file), framework="pt") as tensors:
        return tensors.get_tensor(_key(file, key, list(tensors.keys())))


def _csv(file: Path, key: str | None) -> pa.Table:
    return _columns(pyarrow.csv.read_csv(file), file, key)


def _parquet(file: Path, key: str | None) -> pa.Table:
    return _columns(pq.read_table(file), file, key)


def _columns(table: pa.Table, file: Path, key: str | None) -> pa.Table:
    return (
        table
        if key is None
        else table.select([_key(file, name.strip(), table.column_names) for name in key.split(",")])
    )


def _key(file: Path, key: str | None, names: Sequence[str]) -> str:
    if key is None and ("inputs" in names or len(names) == 1):
        return "inputs" if "inputs" in names else names[0]
    if key is None or key not in names:
        reason = f"has no '{key}'" if key else "holds more than one array"
        raise QueryError(f"{file} {reason}: choose with --key from {list(names)}.")
    return key


READERS = {".npy": _npy, ".npz": _npz, ".csv": _csv, ".parquet": _parquet, ".safetensors": _safetensors}
