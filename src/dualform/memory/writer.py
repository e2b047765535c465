"""Steps on their way to the disk: collected into shards, written behind the training loop's back."""

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dualform.types import LayerInfo, Mark, Transition

from .arena import Arena
from .codec import Encoded
from .files import write_parquet, write_tensors
from .manifest import Manifest, Shard

CALL_COLUMNS = ("layer", "module", "step", "call", "rows", "visit", "batch", "stride", "factor")


@dataclass(frozen=True)
class CallRows:
    """The slots of one call of one module in one backward pass."""

    layer: str
    module: str
    call: int
    visit: int
    batch: int
    stride: int
    factor: float
    keys: Encoded
    errors: Encoded | None

    @property
    def nbytes(self) -> int:
        """What the rows take on disk, about."""
        return sum(e.values.numel() * e.values.element_size() for e in (self.keys, self.errors) if e is not None)


@dataclass(frozen=True)
class ParameterStep:
    """What one step did to one parameter."""

    parameter: str
    transition: Transition | None
    scale: float
    settings: Mapping[str, float]
    sample: bytes
    buffer_sample: bytes


@dataclass
class Pending:
    """The shard that is being filled: complete steps only."""

    number: int
    first: int
    last: int = 0
    calls: list[tuple[int, CallRows]] = field(default_factory=list)
    visits: list[Mapping[str, Any]] = field(default_factory=list)
    visit_count: int = 0
    steps: list[tuple[int, ParameterStep]] = field(default_factory=list)
    snapshots: dict[str, Tensor] = field(default_factory=dict)
    nbytes: int = 0
    marks: tuple[Mark, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    certificate: Mapping[str, Any] = field(default_factory=dict)
    """How exactly the memory explains each parameter after the last step (anything with an error and a floor)."""
    arena: Arena | None = None
    """Where its slots lie, if that may be used again once they are written."""

    def add(self, step: int, visits: Sequence[Mapping[str, Any]], snapshots: Mapping[str, Tensor]) -> None:
        """Take a complete step. ``visits`` are columns of equal length, one mapping a batch."""
        self.last = step
        self.visits += visits
        self.visit_count += sum(len(columns["visit"]) for columns in visits)
        self.keep(snapshots)

    def move(self, step: int, line: ParameterStep) -> None:
        """Take what a step did to a parameter."""
        self.steps.append((step, line))

    def place(self, step: int, call: CallRows) -> None:
        """Take the slots of a step."""
        self.calls.append((step, call))
        self.nbytes += call.nbytes

    def keep(self, snapshots: Mapping[str, Tensor]) -> None:
        """Take tensors that are kept whole."""
        self.snapshots.update(snapshots)
        self.nbytes += sum(t.numel() * t.element_size() for t in snapshots.values())


class Writer:
    """Writes shards in a thread of its own.

    The queue holds one shard: a loop that is faster than the disk waits, memory does not grow. What goes wrong in the
    thread is raised in the loop, at its next call here.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._queue: queue.Queue[Pending | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dualform-writer", daemon=True)
        self._thread.start()

    def put(self, shard: Pending) -> None:
        """Hand over a shard; waits while the disk is behind."""
        self._raise()
        self._queue.put(shard)

    def wait(self) -> None:
        """Come back when everything handed over is on disk and listed in the manifest."""
        self._queue.join()
        self._raise()

    def stop(self) -> None:
        """Finish what was handed over and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def save(self, change: Callable[[Manifest], Manifest]) -> None:
        """Change the manifest itself; only when the queue is empty."""
        self.manifest = change(self.manifest)
        self.manifest.save(self.folder)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        _step_back()
        while (shard := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self.manifest = write_shard(self.folder, self.manifest, shard)
                if shard.arena:
                    shard.arena.give_back()
            except BaseException as error:
                self._error = error
            finally:
                self._queue.task_done()
        self._queue.task_done()


def _step_back() -> None:
    """Let the training loop go first: on Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def write_shard(folder: Path, manifest: Manifest, shard: Pending) -> Manifest:
    """Write the files of a shard, then the manifest that lists them."""
    files = {}
    kind = {layer.name: layer for layer in manifest.layers}
    tables = {"calls": _calls_table(shard), "steps": _steps_table(shard)}
    if shard.visits:
        tables["visits"] = _visits_table(shard)
    tensors = {
        "shards": _slot_tensors(shard, kind),
        "snapshots": {name: [tensor] for name, tensor in shard.snapshots.items()},
    }
    for folder_name, content in tensors.items():
        if content:
            name = f"{folder_name}/{shard.number:06d}.safetensors"
            files[name] = write_tensors(folder / name, content)
    for folder_name, table in tables.items():
        name = f"{folder_name}/{shard.number:06d}.parquet"
        files[name] = write_parquet(folder / name, table)
    slots = {name: 0 for name in kind}
    for _, call in shard.calls:
        slots[call.layer] += call.keys.values.shape[0]
    lines = {name: {"error": found.error, "floor": found.floor} for name, found in shard.certificate.items()}
    certificate = {"step": shard.last, "parameters": lines}
    entry = Shard(shard.number, shard.first, shard.last, shard.visit_count, slots, files)
    manifest = replace(
        manifest,
        shards=(*manifest.shards, entry),
        marks=shard.marks,
        columns=dict(shard.columns),
        certificate=certificate,
    )
    manifest.save(folder)
    return manifest


def _slot_tensors(shard: Pending, layers: Mapping[str, LayerInfo]) -> dict[str, list[Tensor]]:
    tensors: dict[str, list[Tensor]] = {}
    for layer in layers:
        calls = [call for _, call in shard.calls if call.layer == layer]
        if not calls:
            continue
        _put(tensors, layer, "key", [call.keys for call in calls])
        if layers[layer].keep == "slots":
            _put(tensors, layer, "error", [call.errors for call in calls if call.errors is not None])
    return tensors


def _put(tensors: dict[str, list[Tensor]], layer: str, what: str, pieces: Sequence[Encoded]) -> None:
    tensors[f"{layer}.{what}s"] = [piece.values for piece in pieces]
    if any(piece.exponents is not None for piece in pieces):
        tensors[f"{layer}.{what}_exponents"] = [
            torch.zeros(piece.values.shape[0], dtype=torch.int16) if piece.exponents is None else piece.exponents
            for piece in pieces
        ]


def _calls_table(shard: Pending) -> pa.Table:
    columns: dict[str, list[Any]] = {name: [] for name in CALL_COLUMNS}
    for step, call in shard.calls:
        values = (
            call.layer,
            call.module,
            step,
            call.call,
            call.keys.values.shape[0],
            call.visit,
            call.batch,
            call.stride,
            call.factor,
        )
        for name, value in zip(CALL_COLUMNS, values, strict=True):
            columns[name].append(value)
    return pa.table(columns, schema=_CALLS)


_CALLS = pa.schema(
    [("layer", pa.string()), ("module", pa.string()), ("step", pa.int64()), ("call", pa.int32()), ("rows", pa.int64()),
     ("visit", pa.int64()), ("batch", pa.int64()), ("stride", pa.int64()), ("factor", pa.float64())]
)  # fmt: skip


def _steps_table(shard: Pending) -> pa.Table:
    steps, lines = [step for step, _ in shard.steps], [line for _, line in shard.steps]
    unknown = Transition(*[float("nan")] * 6)
    columns: dict[str, Any] = {"step": pa.array(steps, pa.int64())}
    columns["parameter"] = pa.array([line.parameter for line in lines], pa.string())
    numbers = np.array([line.transition or unknown for line in lines], dtype=np.float64).reshape(-1, 6)
    columns |= {name: numbers[:, i] for i, name in enumerate(Transition._fields)}
    columns["scale"] = pa.array([line.scale for line in lines], pa.float64())
    for name in sorted({name for line in lines for name in line.settings}):
        columns[name] = pa.array([line.settings.get(name) for line in lines], pa.float64())
    columns["sample"] = pa.array([line.sample for line in lines], pa.binary())
    columns["buffer_sample"] = pa.array([line.buffer_sample for line in lines], pa.binary())
    return pa.table(columns)


def _visits_table(shard: Pending) -> pa.Table:
    """The visits of all batches as whole columns; a single value stands for every example of its batch."""
    sizes = [len(line["visit"]) for line in shard.visits]
    columns = {}
    for name in shard.visits[0]:
        values = [line[name] for line in shard.visits]
        whole = [v if isinstance(v, np.ndarray) else np.full(n, v) for v, n in zip(values, sizes, strict=True)]
        columns[name] = pa.array(np.concatenate(whole))
    return pa.table(columns)
