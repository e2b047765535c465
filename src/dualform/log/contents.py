"""What is logged of a memory, whatever the tool: numbers by name, its certificate as text, and tables of answers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dualform.errors import QueryError
from dualform.explain import Memory

Tables = Mapping[str, Any]
"""Answers by a name of your choice: all that has ``to_pandas`` (hits, groups, influence, …), or DataFrames."""


@dataclass(frozen=True)
class LoggedContents:
    """Numbers, text and tables. All names begin with "dualform/"."""

    numbers: Mapping[str, float]
    text: str
    tables: Mapping[str, Any]
    """DataFrames in which each column holds numbers, truth values or text."""


def contents(memory: Memory, tables: Tables | None = None) -> LoggedContents:
    """The sizes of a memory, its certificate with the rounding floor of training, and tables of answers."""
    manifest = memory.store.manifest
    numbers: dict[str, float] = {"steps": memory.step, "visits": len(memory.visits), "marks": len(manifest.marks)}
    numbers |= {f"slots/{layer.name}": memory.store.slots(layer.name) for layer in manifest.layers}
    sizes = bytes_by_kind(memory)
    numbers |= {f"bytes/{kind}": count for kind, count in sizes.items()} | {"bytes/total": sum(sizes.values())}
    text = f"{memory!r}"
    if memory.step and not manifest.survey:
        certificate = memory.certificate
        numbers |= {f"certificate/{name}": error for name, error in certificate.items()}
        numbers |= {f"floor/{name}": floor for name, floor in certificate.floor.items()}
        numbers |= {"certificate/worst": certificate.worst} if len(certificate) else {}
        text = str(certificate)
    frames = {_name(name): as_frame(name, answer) for name, answer in (tables or {}).items()}
    return LoggedContents({_name(name): float(value) for name, value in numbers.items()}, text, frames)


def bytes_by_kind(memory: Memory) -> dict[str, int]:
    """The bytes that the files of each kind take on disk."""
    sizes: dict[str, int] = {}
    for name, count in memory.store.file_sizes.items():
        kind = name.split("/")[0].removesuffix(".safetensors")
        sizes[kind] = sizes.get(kind, 0) + count
    return sizes


def as_frame(name: str, answer: Any) -> Any:
    """An answer as a DataFrame with plain names and values: tools take no objects, and no index."""
    frame = answer.to_pandas() if hasattr(answer, "to_pandas") else answer
    if not hasattr(frame, "columns"):
        raise QueryError(
            f"tables={{{name!r}: …}} holds a {type(answer).__name__}, which is no table. Give an answer, such as "
            "spot.top(5), or a DataFrame."
        )
    frame = frame.reset_index() if any(part is not None for part in frame.index.names) else frame.copy()
    frame.columns = [str(column) for column in frame.columns]
    for column in frame.columns:
        if frame[column].dtype.kind not in "biuf":
            frame[column] = _of_one_kind(frame[column].tolist())
    return frame


def _of_one_kind(values: list[Any]) -> list[Any]:
    """The values of a column as they are if all are numbers, else as text: some tools refuse a column with both."""
    if all(isinstance(value, bool | int | float) for value in values):
        return values
    return ["unknown" if value is None or value != value else str(value) for value in values]


def _name(name: str) -> str:
    """A name that every tool takes: of other characters than theirs, only an underscore is left."""
    return "dualform/" + re.sub(r"[^\w\-./ ]", "_", name)
