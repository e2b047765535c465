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
    Shard,
    calls_table,
    steps_table,
    visits_table,
    write_ledger,
    write_tensors,
)
from .io import FileEntry, write_parquet


@dataclass
class PendingShard:
    """The shard that is being filled: complete steps only."""

    number: int
    first: int
    last: int = 0
    calls: list[CallRow] = field(default_factory=list)
    slots: Mapping[str, Sequence[tuple[EncodedRows, EncodedRows | None]]] = field(default_factory=dict)
    """The keys and errors of each layer, in the order of its calls, in as few pieces as they lie in memory."""
    visits: list[Mapping[str, Any]] = field(default_factory=list)
    """Columns of equal length, one mapping a batch."""
    steps: list[tuple[int, ParameterStep]] = field(default_factory=list)
    snapshots: dict[str, Tensor] = field(default_factory=dict)
    kept: int = 0
    """The bytes of the snapshots."""
    marks: tuple[Mark, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    certificate: Mapping[str, Any] | None = None
    """How exactly the memory explains each parameter after the last step (anything with an error and a floor); None
    where the weights of that step are not at hand."""
    ledger: LedgerState | None = None
    """The ledger as it stands after the last step, if it is to be kept."""
    replaces: bool = False
    """Whether it takes the place of all shards before it: a ledger alone does not grow with the steps."""
    revised: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the manifest that are no longer as they were when recording began."""
    at_end: Callable[[], None] = lambda: None
    """Called when nobody needs the memory of its slots any more."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set when it is on the disk, or will never be."""

    def keep(self, snapshots: Mapping[str, Tensor]) -> None:
        """Take tensors that are kept whole."""
        self.snapshots.update(snapshots)
        self.kept += sum(t.numel() * t.element_size() for t in snapshots.values())


class ShardWriter:
    """Writes shards in a thread of its own.

    Who hands over waits for room first, so that memory does not grow where a loop is faster than the disk. What goes
    wrong in the thread is raised in the loop, at its next call here. A shard may be handed over again by who does not
    know whether it was: it is written once.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._queue: queue.SimpleQueue[PendingShard | None] = queue.SimpleQueue()
        self._last: PendingShard | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dualform-writer", daemon=True)
        self._thread.start()

    def put(self, shard: PendingShard) -> None:
        """Hand over a shard. Its slots must stay where they are until its end."""
        self._raise()
        if not self.has(shard):
            self._refuse_gap(shard)
            self._last = shard
        if shard is self._last:
            self._queue.put(shard)

    def has(self, shard: PendingShard) -> bool:
        """Whether a shard has been handed over."""
        return self._last is not None and shard.number <= self._last.number

    def wait_for_room(self) -> None:
        """Come back when the shard before is out of the way: on disk, or it never will be."""
        if self._last is not None:
            self._last.done.wait()

    def has_room(self, within: float) -> bool:
        """Whether the shard before is out of the way, now or within so many seconds."""
        return self._last is None or self._last.done.wait(within)

    def wait(self) -> None:
        """Come back when everything handed over is on disk and listed in the manifest."""
        self.wait_for_room()
        self._raise()

    def certify(self, found: Mapping[str, Any]) -> None:
        """Add to the certificate, when all else is on disk: anything with an error and a floor."""
        kept = self.manifest.certificate
        assert kept is not None
        lines = {**kept["parameters"], **certificate_lines(found)}
        self.manifest = replace(self.manifest, certificate={**kept, "parameters": lines})
        self.manifest.save(self.folder)

    def end(self, ended: Ended) -> None:
        """Say how the recording ended, when all else is on disk."""
        self.manifest = replace(self.manifest, ended=ended)
        self.manifest.save(self.folder)

    def stop(self, wait: bool = True) -> None:
        """Finish what was handed over and end the thread; without waiting for that if the disk may hang."""
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _refuse_gap(self, shard: PendingShard) -> None:
        """Steps follow one another; only what is kept at the end may belong to a step that is there already."""
        end = self.manifest.steps if self._last is None else self._last.last
        if shard.first != end + 1 and not (shard.first == shard.last == end and not shard.calls):
            raise RecordError(
                f"a shard with the steps {shard.first} to {shard.last} cannot follow step {end}: steps between them "
                f"are missing, or there twice. The memory stands at step {end}. Record anew, or resume from there."
            )

    def _run(self) -> None:
        _step_back()
        while (shard := self._queue.get()) is not None:
            if shard.done.is_set():
                continue  # it came a second time
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
        """Write the files of a shard, then the manifest that lists them."""
        files = {}
        if slots := _slot_tensors(shard):
            name = f"shards/{shard.number:06d}.safetensors"
            files[name] = write_tensors(self.folder / name, slots, paged=True)
        files |= write_tables(self.folder, shard)
        ledger = None if shard.ledger is None else write_ledger(self.folder, shard.last, shard.ledger)
        before, self.manifest = self.manifest, with_shard(self.manifest, shard, files, ledger)
        self.manifest.save(self.folder)
        if before.ledgers != self.manifest.ledgers or shard.replaces:
            with contextlib.suppress(WriteError):  # Windows keeps a file that somebody reads; the next call removes it
                remove_unlisted(self.folder, self.manifest)


def _step_back() -> None:
    """Let the training loop go first: on Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def write_tables(folder: Path, shard: PendingShard) -> dict[str, FileEntry]:
    """Write all of a shard but its slots."""
    files = {}
    if shard.snapshots:
        name = f"snapshots/{shard.number:06d}.safetensors"
        files[name] = write_tensors(folder / name, {name: [tensor] for name, tensor in shard.snapshots.items()})
    tables = {} if shard.replaces else {"calls": calls_table(shard.calls), "steps": steps_table(shard.steps)}
    if shard.visits:
        tables["visits"] = visits_table(shard.visits)
    for kind, table in tables.items():
        name = f"{kind}/{shard.number:06d}.parquet"
        files[name] = write_parquet(folder / name, table)
    return files


def with_shard(
    manifest: Manifest, shard: PendingShard, files: Mapping[str, FileEntry], ledger: LedgerEntry | None = None
) -> Manifest:
    """The manifest that lists a shard too."""
    manifest = replace(manifest, **shard.revised)
    slots = {layer.name: 0 for layer in manifest.layers}
    for call in shard.calls:
        slots[call.layer] += call.rows
    known = shard.certificate
    certificate = None if known is None else {"step": shard.last, "parameters": certificate_lines(known)}
    visits = sum(len(columns["visit"]) for columns in shard.visits)
    older = [each for each in manifest.ledgers if each.step < shard.last]
    before = _before(manifest, older[-1:]) if shard.replaces else manifest.shards
    first = min(before[-1].last + 1 if before else 1, shard.last) if shard.replaces else shard.first
    entry = Shard(shard.number, first, shard.last, visits, slots, files)
    return replace(
        manifest,
        shards=(*before, entry),
        ledgers=manifest.ledgers if ledger is None else (*older[-1:], ledger),
        marks=shard.marks,
        columns=dict(shard.columns),
        certificate=certificate,
    )


def _before(manifest: Manifest, ledgers: Sequence[LedgerEntry]) -> tuple[Shard, ...]:
    """The shards of a ledger alone that are still needed: what was kept whole with the ledger before the last."""
    kept = [shard for shard in manifest.shards if ledgers and shard.last >= ledgers[0].step]
    return (replace(kept[0], first=1), *kept[1:]) if kept else ()


def certificate_lines(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What the manifest keeps of a certificate."""
    return {name: {"error": each.error, "floor": each.floor} for name, each in found.items()}


def _slot_tensors(shard: PendingShard) -> dict[str, list[Tensor]]:
    tensors: dict[str, list[Tensor]] = {}
    for layer, pieces in shard.slots.items():
        _put(tensors, layer, "key", [keys for keys, _ in pieces])
        if errors := [found for _, found in pieces if found is not None]:
            _put(tensors, layer, "error", errors)
    return tensors


def _put(tensors: dict[str, list[Tensor]], layer: str, what: str, pieces: Sequence[EncodedRows]) -> None:
    tensors[f"{layer}.{what}s"] = [piece.values for piece in pieces]
    if any(piece.exponents is not None for piece in pieces):
        tensors[f"{layer}.{what}_exponents"] = [
            torch.zeros(piece.values.shape[0], dtype=torch.int16) if piece.exponents is None else piece.exponents
            for piece in pieces
        ]
