"""A memory that several processes wrote (``torchrun``): each its own part, and together they open as one.

The first process writes into the folder itself, process r into ``ranks/000r``: its shards, calls and visits, and a
manifest that lists them. Steps end at the same places in all parts, and a step counts when all of them hold it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualform.errors import CorruptMemory, NotAMemory, StoreError
from dualform.types import Ended, Mark

from .format import LedgerEntry, Manifest, Shard, read_manifest

RANKS = "ranks"


def rank_folder(folder: Path, rank: int) -> Path:
    """The folder of a process's part."""
    return folder / _prefix(rank)


def _prefix(rank: int) -> PurePosixPath:
    return PurePosixPath(RANKS, f"{rank:04d}") if rank else PurePosixPath()


def load_manifest(folder: Path) -> Manifest:
    """Read the manifest of a memory, or say why not; of several parts the one that they make together."""
    first = read_manifest(folder)
    if first.rank:
        raise NotAMemory(
            f"{folder} holds what process {first.rank} of {first.ranks} recorded, which is not a memory by itself. "
            f"Open the folder of them all: {folder.absolute().parents[1]}."
        )
    if first.ranks == 1:
        return first
    parts = [first]
    for rank in range(1, first.ranks):
        try:
            parts.append(read_manifest(rank_folder(folder, rank)))
        except (NotAMemory, StoreError) as error:
            raise CorruptMemory(
                f"the memory at {folder} was written by {first.ranks} processes, and the part of process {rank} cannot "
                f"be read ({error}). Restore it from a copy."
            ) from error
    return _joined(folder, parts)


def _joined(folder: Path, parts: Sequence[Manifest]) -> Manifest:
    step = min(part.steps for part in parts)
    shards = [
        (shard.first, rank, _moved(rank, _upto(rank_folder(folder, rank), shard, step)))
        for rank, part in enumerate(parts)
        for shard in part.shards
        if shard.first <= step
    ]
    kept = set.intersection(*({entry.step for entry in part.ledgers} for part in parts))
    ledgers = [
        replace(entry, name=str(_prefix(rank) / entry.name))
        for rank, part in enumerate(parts)
        for entry in part.ledgers
        if entry.step in kept
    ]
    first = parts[0]
    return replace(
        first,
        shards=tuple(shard for _, _, shard in sorted(shards, key=lambda each: each[:2])),
        columns=next((part.columns for part in parts if part.columns), {}),
        marks=_marks(parts, step),
        certificate=first.certificate if first.steps == step else None,
        ledgers=tuple(ledgers),
        ended=_ended(parts),
    )


def _ended(parts: Sequence[Manifest]) -> Ended | None:
    """How all parts ended: closed if all were, else as the first that was not."""
    endings = [part.ended for part in parts]
    return next((ended for ended in endings if ended is None or ended.how == "interrupted"), endings[0])


def _moved(rank: int, shard: Shard) -> Shard:
    """A shard of a part, with the names of its files as the whole memory knows them."""
    return replace(shard, files={str(_prefix(rank) / name): entry for name, entry in shard.files.items()})


def _marks(parts: Sequence[Manifest], step: int) -> tuple[Mark, ...]:
    """What any process noticed, once."""
    found: dict[tuple[str, str], Mark] = {}
    for part in parts:
        for mark in part.marks:
            if mark.first_step <= step:
                found.setdefault((mark.kind, mark.name), mark)
    return tuple(found.values())


def _upto(folder: Path, shard: Shard, step: int) -> Shard:
    return shard if shard.last <= step else truncate_shard(folder, shard, step)


def truncate_shard(folder: Path, shard: Shard, step: int) -> Shard:
    """The part of a shard up to a step; its files stay as they are, only the manifest counts less of them."""
    calls, visits = lines(folder, shard, "calls"), lines(folder, shard, "visits")
    if calls is None:  # a ledger alone: what was kept whole with it belongs to a later step
        return replace(shard, last=step, files={})
    inside = calls["step"].to_numpy() <= step
    layers, rows = calls["layer"].to_numpy(zero_copy_only=False)[inside], calls["rows"].to_numpy()[inside]
    return replace(
        shard,
        last=step,
        visits=0 if visits is None else int(np.sum(visits["step"].to_numpy() <= step)),
        slots={layer: int(rows[layers == layer].sum()) for layer in shard.slots},
    )


def lines(folder: Path, shard: Shard, kind: str) -> pa.Table | None:
    """The lines of a shard's table ("calls", "visits", "steps") that count; None where it has none."""
    file = shard.file(kind)
    field = pa.compute.field  # type: ignore[attr-defined]
    return None if file is None else pq.read_table(folder / file).filter(field("step") <= shard.last)


def ledgers_by_rank(entries: Sequence[LedgerEntry], step: int) -> Mapping[int, LedgerEntry]:
    """The ledgers of a step, one for each process that kept one."""
    found = {}
    for entry in entries:
        if entry.step == step:
            parts = PurePosixPath(entry.name).parts
            found[int(parts[1]) if parts[0] == RANKS else 0] = entry
    return found
