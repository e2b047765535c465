"""Data of every kind, as a table or as arrays by name: files, saved data sets, DataFrames. Nothing is unpickled."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualform.errors import DataNotFound, QueryError

KINDS = (".npy", ".npz", ".csv", ".parquet", ".safetensors")
"""The files that can be read."""

WHAT = (
    f"Give a file ({', '.join(KINDS)}), a folder that datasets.Dataset.save_to_disk wrote, a pandas DataFrame, a "
    "pyarrow Table or a datasets.Dataset."
)


def open_source(source: Any, as_text: Collection[str] = ()) -> pa.Table | Mapping[str, Callable[[], Any]]:
    """A table, or functions that read the arrays of a file, by name (a single array without a name: ``""``).

    ``as_text`` names columns of a CSV whose words are kept as they are written, also if they look like numbers.
    """
    if isinstance(source, pa.Table):
        return source
    if hasattr(source, "__dataframe__") and hasattr(source, "iloc"):  # a pandas DataFrame
        return pa.Table.from_pandas(source, preserve_index=False)
    if hasattr(source, "with_format") and hasattr(source, "column_names"):  # a datasets.Dataset
        splits = list(source.column_names) if isinstance(source.column_names, Mapping) else []
        _require_one_split(splits, "this DatasetDict", "Pass one of them")
        return source.with_format("arrow")[:]
    if not isinstance(source, str | Path):
        raise QueryError(f"cannot read a {type(source).__name__} as rows. {WHAT}")
    file = Path(source)
    if file.is_dir():
        return _saved_dataset(file)
    if not file.is_file():
        raise DataNotFound(f"there is no file {file}. {WHAT}")
    if file.suffix not in KINDS:
        raise QueryError(f"cannot read {file}: '{file.suffix}' is not one of {', '.join(KINDS)}.")
    if file.suffix == ".csv":
        kinds = pyarrow.csv.ConvertOptions(column_types={name: pa.string() for name in as_text})
        return pyarrow.csv.read_csv(file, convert_options=kinds)
    if file.suffix == ".parquet":
        return pq.read_table(file)
    return {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors}[file.suffix](file)


def column_names(source: str | Path) -> list[str] | None:
    """The names of the columns of a file, or of the arrays in it, without reading rows; None if nothing has a name."""
    file = Path(source)
    try:
        if file.suffix == ".csv" and file.is_file():
            with pyarrow.csv.open_csv(file) as reader:
                return reader.schema.names
        if file.suffix == ".parquet" and file.is_file():
            return pq.read_schema(file).names
        data = open_source(file)
    except READING_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise QueryError(f"cannot read {source}: {reason}") from error
    return [name for name in data if name] or None if isinstance(data, Mapping) else data.column_names


READING_ERRORS = (ValueError, OSError, pa.ArrowException, SafetensorError, TypeError)
"""What the readers raise at a broken file."""


def take(data: Any, rows: Sequence[int] | slice | None, source: str) -> Any:
    """Some rows of a table or an array; negative numbers count from the end."""
    if rows is None:
        return data
    count = len(data)
    if isinstance(rows, slice):
        rows = range(count)[rows]
    for row in rows:
        if not -count <= row < count:
            raise QueryError(f"{source} has no row {row}: it holds {count:,} rows, counted from 0.")
    index = [row % count for row in rows]
    return data.take(index) if isinstance(data, pa.Table) else data[index]


def as_tensor(data: Any) -> Tensor:
    """An array as a tensor of its own."""
    if isinstance(data, Tensor):
        return data
    array = np.asarray(data)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable))


def class_names(table: pa.Table, column: str) -> tuple[str, ...]:
    """The class names that the ``datasets`` library stored for a column; none if there are none."""
    stored = (table.schema.metadata or {}).get(b"huggingface")
    try:
        feature = json.loads(stored or b"{}").get("info", {}).get("features", {}).get(column, {})
        names = feature.get("names", []) if feature.get("_type") == "ClassLabel" else []
    except (ValueError, AttributeError):
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _saved_dataset(folder: Path) -> pa.Table:
    """The Arrow files of a data set that ``save_to_disk`` wrote. The library itself is not needed."""
    splits = _json(folder / "dataset_dict.json").get("splits", [])
    _require_one_split(splits, str(folder), f"Give the folder of one of them, as in {folder / (splits or [''])[0]}")
    files = [str(entry["filename"]) for entry in _json(folder / "state.json").get("_data_files", [])]
    if not files:
        raise QueryError(f"the folder {folder} holds no data set that datasets.Dataset.save_to_disk wrote. {WHAT}")
    parts = []
    for name in files:
        if Path(name).name != name:
            raise QueryError(f"cannot read {folder}: its state.json names the file {name!r}, outside of the folder.")
        with pa.memory_map(str(folder / name)) as file:
            parts.append(pa.ipc.open_stream(file).read_all())
    return pa.concat_tables(parts)


def _require_one_split(splits: Sequence[str], source: str, advice: str) -> None:
    if splits:
        raise QueryError(f"{source} holds the splits {list(splits)}. {advice}.")


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _npy(file: Path) -> dict[str, Callable[[], Any]]:
    array = np.load(file, mmap_mode="c", allow_pickle=False)  # copy on write: the file is never changed
    return {"": lambda: array}


def _npz(file: Path) -> dict[str, Callable[[], Any]]:
    def array(name: str) -> np.ndarray:
        with np.load(file, allow_pickle=False) as arrays:
            return arrays[name]

    with np.load(file, allow_pickle=False) as arrays:
        return {name: lambda name=name: array(name) for name in arrays.files}


def _safetensors(file: Path) -> dict[str, Callable[[], Any]]:
    def tensor(name: str) -> Tensor:
        with safe_open(str(file), framework="pt") as tensors:
            return tensors.get_tensor(name)

    with safe_open(str(file), framework="pt") as tensors:
        return {name: lambda name=name: tensor(name) for name in tensors.keys()}  # noqa: SIM118
