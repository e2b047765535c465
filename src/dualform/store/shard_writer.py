"""Writing to disk: complete steps are collected into shards, and a thread writes them while training goes on."""

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dualform.errors import RecordError, WriteError
from dualform.types import Ended, Mark

from .folder import remove_unlisted
from .format import (
    CallRow,
    EncodedRows,
    LedgerEntry,
    LedgerState,
    Manifest,
    ParameterStep,
    RunLogLines,
    Shard,
    StateEntry,
    calls_table,
    file_bytes,
    run_log_table,
    steps_table,
    visits_table,
    write_ledger,
    write_state,
    write_tensors,
)
from .io import FileEntry, write_parquet


@dataclass
class PendingShard:
    """A shard that is being filled, with complete steps only."""

    number: int
    first: int
    last: int = 0
    calls: list[CallRow] = field(default_factory=list)
    slots: Mapping[str, Sequence[tuple[EncodedRows, EncodedRows | None]]] = field(default_factory=dict)
    """The keys and errors of each layer, in the order of its calls, as few contiguous pieces of memory."""
    visits: list[Mapping[str, Any]] = field(default_factory=list)
    """One mapping of columns for each batch; all columns of a batch have the same length."""
    steps: list[tuple[int, ParameterStep]] = field(default_factory=list)
    snapshots: dict[str, Tensor] = field(default_factory=dict)
    kept: int = 0
    """The bytes of the snapshots."""
    log: RunLogLines = field(default_factory=RunLogLines)
    """What is added to the log by which training can be run again."""
    marks: tuple[Mark, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    certificate: Mapping[str, Any] | None = None
    """How exactly the memory explains each parameter after the last step (objects with an error and a floor); None
    if the weights of that step are not available."""
    ledger: LedgerState | None = None
    """The ledger after the last step, if it is to be stored."""
    replaces: bool = False
    """Whether it replaces all shards before it: a memory that holds only a ledger does not grow with the steps."""
    revised: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the manifest that have changed since recording began."""
    at_end: Callable[[], None] = lambda: None
    """Called when the buffers of its slots are no longer needed."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set when it is on disk, or when writing has failed for good."""

    def keep(self, snapshots: Mapping[str, Tensor]) -> None:
        """Add tensors that are stored whole."""
        self.snapshots.update(snapshots)
        self.kept += sum(t.numel() * t.element_size() for t in snapshots.values())


class ShardWriter:
    """Writes shards in a thread of its own.

    The caller waits for the previous shard before it passes the next one, so that memory use does not grow when
    training is faster than the disk. An error in the thread is raised in the training loop, at the next call of a
    method here. After an interrupt a caller may pass the same shard a second time: it is written only once.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._queue: queue.SimpleQueue[PendingShard | None] = queue.SimpleQueue()
        self._last: PendingShard | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dualform-writer", daemon=True)
        self._thread.start()

    def put(self, shard: PendingShard) -> None:
        """Queue a shard. The buffers of its slots must not be reused before ``at_end`` is called."""
        self._raise()
        if not self.has(shard):
            self._refuse_gap(shard)
            self._last = shard
        if shard is self._last:
            self._queue.put(shard)

    def has(self, shard: PendingShard) -> bool:
        """Whether a shard has been queued before."""
        return self._last is not None and shard.number <= self._last.number

    def wait_for_room(self) -> None:
        """Wait until the previous shard is on disk, or has failed for good."""
        if self._last is not None:
            self._last.done.wait()

    def has_room(self, within: float) -> bool:
        """Whether the previous shard is finished, after waiting at most ``within`` seconds."""
        return self._last is None or self._last.done.wait(within)

    def wait(self) -> None:
        """Wait until every queued shard is on disk and listed in the manifest."""
        self.wait_for_room()
        self._raise()

    def certify(self, agreements: Mapping[str, Any]) -> None:
        """Add parameters to the certificate (objects with an error and a floor), when all shards are on disk."""
        certificate = self.manifest.certificate
        assert certificate is not None
        lines = {**certificate["parameters"], **certificate_lines(agreements)}
        self.manifest = replace(self.manifest, certificate={**certificate, "parameters": lines})
        self.manifest.save(self.folder)

    def revise(self, fields: Mapping[str, Any]) -> None:
        """Change fields of the manifest and save it, when all shards are on disk."""
        self.wait()
        self.manifest = replace(self.manifest, **fields)
        self.manifest.save(self.folder)

    def end(self, ended: Ended) -> None:
        """Store how the recording ended, when all shards are on disk."""
        self.manifest = replace(self.manifest, ended=ended)
        self.manifest.save(self.folder)

    def stop(self, wait: bool = True) -> None:
        """Let the thread write what is queued and end; ``wait=False`` returns at once, for a disk that may hang."""
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _refuse_gap(self, shard: PendingShard) -> None:
        """Raise an error unless the shard begins at the next step.

        Snapshots taken at the end may belong to the last step again.
        """
        end = self.manifest.steps if self._last is None else self._last.last
        if shard.first != end + 1 and not (shard.first == shard.last == end and not shard.calls):
            raise RecordError(
                f"a shard with the steps {shard.first} to {shard.last} cannot follow step {end}: steps between them "
                f"are missing or duplicated. The memory ends at step {end}. Record again, or resume from there."
            )

    def _run(self) -> None:
        _lower_priority()
        while (shard := self._queue.get()) is not None:
            if shard.done.is_set():
                continue  # it was queued a second time
            try:
                if self._error is None:
                    self._write(shard)
            except BaseException as error:
                self._error = error
            finally:
                shard.at_end()
                shard.done.set()
                del shard

    def _write(self, shard: PendingShard) -> None:
        """Write the files of a shard (slots, snapshots, tables), then the manifest that lists them."""
        files = {}
        if slots := _slot_tensors(shard):
            name = f"shards/{shard.number:06d}.safetensors"
            files[name] = write_tensors(self.folder / name, slots, paged=True)
        if shard.snapshots:
            name = f"snapshots/{shard.number:06d}.safetensors"
            files[name] = write_tensors(self.folder / name, {key: [tensor] for key, tensor in shard.snapshots.items()})
        if shard.log.generators:
            name = f"generators/{shard.number:06d}.safetensors"
            files[name] = write_tensors(
                self.folder / name, {str(visit): [state] for visit, state in shard.log.generators.items()}
            )
        tables = {} if shard.replaces else {"calls": calls_table(shard.calls), "steps": steps_table(shard.steps)}
        if shard.log.steps:
            tables["run_log"] = run_log_table(shard.log.steps)
        if shard.visits:
            tables["visits"] = visits_table(shard.visits)
        for kind, table in tables.items():
            name = f"{kind}/{shard.number:06d}.parquet"
            files[name] = write_parquet(self.folder / name, table)
        ledger = None if shard.ledger is None else write_ledger(self.folder, shard.last, shard.ledger)
        states = [write_state(self.folder, step, tensors) for step, tensors in shard.log.states.items()]
        before, self.manifest = self.manifest, with_shard(self.manifest, shard, files, ledger, states)
        self.manifest.save(self.folder)
        if before.ledgers != self.manifest.ledgers or shard.replaces or shard.log.dropped:
            with contextlib.suppress(WriteError):  # Windows keeps a file that somebody reads; the next call removes it
                remove_unlisted(self.folder, self.manifest)


def _lower_priority() -> None:
    """Give the training loop precedence: on Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def with_shard(
    manifest: Manifest,
    shard: PendingShard,
    files: Mapping[str, FileEntry],
    ledger: LedgerEntry | None = None,
    states: Sequence[StateEntry] = (),
) -> Manifest:
    """The manifest with one more shard."""
    manifest = replace(manifest, **shard.revised)
    run_log, revised = manifest.run_log, shard.log.revised
    if run_log is not None and revised is not None:
        run_log = replace(revised, states=run_log.states)
    slots = {layer.name: 0 for layer in manifest.layers}
    for call in shard.calls:
        slots[call.layer] += call.rows
    certificate = None
    if shard.certificate is not None:
        certificate = {"step": shard.last, "parameters": certificate_lines(shard.certificate)}
    visits = sum(len(columns["visit"]) for columns in shard.visits)
    older = [entry for entry in manifest.ledgers if entry.step < shard.last]
    before = _still_needed_shards(manifest, older[-1:]) if shard.replaces else manifest.shards
    first = min(before[-1].last + 1 if before else 1, shard.last) if shard.replaces else shard.first
    entry = Shard(shard.number, first, shard.last, visits, slots, files)
    return replace(
        manifest,
        shards=(*before, entry),
        ledgers=manifest.ledgers if ledger is None else (*older[-1:], ledger),
        marks=shard.marks,
        columns=dict(shard.columns),
        certificate=certificate,
        run_log=None if run_log is None else run_log.with_states(states, shard.log.dropped),
    )


def _still_needed_shards(manifest: Manifest, ledgers: Sequence[LedgerEntry]) -> tuple[Shard, ...]:
    """The shards that a memory of only a ledger still needs: the snapshots beside the previous ledger."""
    shards = [shard for shard in manifest.shards if ledgers and shard.last >= ledgers[0].step]
    return (replace(shards[0], first=1), *shards[1:]) if shards else ()


def certificate_lines(agreements: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The form of a certificate in the manifest."""
    return {name: {"error": agreement.error, "floor": agreement.floor} for name, agreement in agreements.items()}


def slot_file_bytes(shard: PendingShard) -> int:
    """The size of the file that will hold the slots of a shard."""
    slots = _slot_tensors(shard)
    return file_bytes(slots, paged=True) if slots else 0


def _slot_tensors(shard: PendingShard) -> dict[str, list[Tensor]]:
    tensors: dict[str, list[Tensor]] = {}
    for layer, pieces in shard.slots.items():
        _add_tensors(tensors, layer, "key", [keys for keys, _ in pieces])
        if errors := [errors for _, errors in pieces if errors is not None]:
            _add_tensors(tensors, layer, "error", errors)
    return tensors


def _add_tensors(
    tensors: dict[str, list[Tensor]], layer: str, row_kind: Literal["key", "error"], pieces: Sequence[EncodedRows]
) -> None:
    tensors[f"{layer}.{row_kind}s"] = [piece.values for piece in pieces]
    if any(piece.exponents is not None for piece in pieces):
        tensors[f"{layer}.{row_kind}_exponents"] = [
            torch.zeros(piece.values.shape[0], dtype=torch.int16) if piece.exponents is None else piece.exponents
            for piece in pieces
        ]
