"""A memory that several processes wrote (``torchrun``): each writes its own part, and all parts open as one memory.

The first process writes into the folder itself, process r into ``ranks/000r``: its shards, calls and visits, and a
manifest that lists them. The steps are the same in all parts, and a step counts when every part holds it.
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
    """The folder that holds the part of a process."""
    return folder / _prefix(rank)


def _prefix(rank: int) -> PurePosixPath:
    return PurePosixPath(RANKS, f"{rank:04d}") if rank else PurePosixPath()


def load_manifest(folder: Path) -> Manifest:
    """Read the manifest of a memory, joined over all processes that wrote it; raise an error if that is impossible."""
    first = read_manifest(folder)
    if first.rank:
        raise NotAMemory(
            f"{folder} holds what process {first.rank} of {first.ranks} recorded, which is not a memory by itself. "
            f"Open the folder of all processes: {folder.absolute().parents[1]}."
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
    return _join_manifests(folder, parts)


def _join_manifests(folder: Path, parts: Sequence[Manifest]) -> Manifest:
    step = min(part.steps for part in parts)
    shards = [
        (shard.first, rank, _with_rank_prefix(rank, _shard_upto(rank_folder(folder, rank), shard, step)))
        for rank, part in enumerate(parts)
        for shard in part.shards
        if shard.first <= step
    ]
    common_steps = set.intersection(*({entry.step for entry in part.ledgers} for part in parts))
    ledgers = [
        replace(entry, name=str(_prefix(rank) / entry.name))
        for rank, part in enumerate(parts)
        for entry in part.ledgers
        if entry.step in common_steps
    ]
    first = parts[0]
    return replace(
        first,
        shards=tuple(shard for _, _, shard in sorted(shards, key=lambda first_rank_shard: first_rank_shard[:2])),
        columns=next((part.columns for part in parts if part.columns), {}),
        marks=_join_marks(parts, step),
        certificate=first.certificate if first.steps == step else None,
        ledgers=tuple(ledgers),
        ended=_join_endings(parts),
    )


def _join_endings(parts: Sequence[Manifest]) -> Ended | None:
    """How the recording ended: closed if every part was closed, else as the first part that was not."""
    endings = [part.ended for part in parts]
    return next((ended for ended in endings if ended is None or ended.how == "interrupted"), endings[0])


def _with_rank_prefix(rank: int, shard: Shard) -> Shard:
    """A shard of a part, with its file names relative to the folder of the joined memory."""
    return replace(shard, files={str(_prefix(rank) / name): entry for name, entry in shard.files.items()})


def _join_marks(parts: Sequence[Manifest], step: int) -> tuple[Mark, ...]:
    """The marks of all processes, each mark once."""
    marks: dict[tuple[str, str], Mark] = {}
    for part in parts:
        for mark in part.marks:
            if mark.first_step <= step:
                marks.setdefault((mark.kind, mark.name), mark)
    return tuple(marks.values())


def _shard_upto(folder: Path, shard: Shard, step: int) -> Shard:
    return shard if shard.last <= step else truncate_shard(folder, shard, step)


def truncate_shard(folder: Path, shard: Shard, step: int) -> Shard:
    """The part of a shard up to a step. Its files stay as they are; the manifest counts fewer of their lines."""
    calls, visits = lines(folder, shard, "calls"), lines(folder, shard, "visits")
    if calls is None:  # only a ledger: the snapshots beside it belong to a later step
        return replace(shard, last=step, files={})
    counts = calls["step"].to_numpy() <= step
    layers, rows = calls["layer"].to_numpy(zero_copy_only=False)[counts], calls["rows"].to_numpy()[counts]
    return replace(
        shard,
        last=step,
        visits=0 if visits is None else int(np.sum(visits["step"].to_numpy() <= step)),
        slots={layer: int(rows[layers == layer].sum()) for layer in shard.slots},
    )


def lines(folder: Path, shard: Shard, kind: str) -> pa.Table | None:
    """The lines of a table of a shard ("calls", "visits", "steps") that count; None if the shard has no such table."""
    file = shard.file(kind)
    field = pa.compute.field  # type: ignore[attr-defined]
    return None if file is None else pq.read_table(folder / file).filter(field("step") <= shard.last)


def ledgers_by_rank(entries: Sequence[LedgerEntry], step: int) -> Mapping[int, LedgerEntry]:
    """The ledgers of a step by the rank of the process that wrote them."""
    ledgers = {}
    for entry in entries:
        if entry.step == step:
            parts = PurePosixPath(entry.name).parts
            ledgers[int(parts[1]) if parts[0] == RANKS else 0] = entry
    return ledgers
