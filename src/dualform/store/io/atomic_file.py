"""Atomic files: each appears complete or not at all, and its checksum is known."""

import errno
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from dualform.errors import CorruptMemory, WriteError

from .direct_io import DirectFile

IN_USE = (5, 32, 33, 1224)
"""The numbers of the errors with which Windows refuses to replace, remove or open a file that somebody has open."""

RETRIES = (0.001, 0.01, 0.1, 0.5, 1.0)
"""Seconds between the tries: whoever reads a manifest has it open for an instant."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class FileEntry:
    """The size and checksum of a file, as the manifest lists them."""

    bytes: int
    xxh3: str


def write_whole(path: Path, fill: Callable[[DirectFile], None], size: int = 0) -> FileEntry:
    """Write a file under a temporary name, flush it to the disk, then rename it to ``path``."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        out = DirectFile(partial, size)
        try:
            fill(out)
            out.finish()
        finally:
            out.close()
        retry_while_in_use(lambda: os.replace(partial, path))
        _sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise WriteError(_failure_message(path, error)) from error
    return FileEntry(out.size, out.hash.hexdigest())


def _failure_message(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        cause = "the disk is full"
    elif is_in_use(error):
        cause = "a memory that is open here or in another program uses the file that was to be replaced"
    else:
        cause = f"the operating system reports: {error.strerror or error}"
    return (
        f"cannot write {path}: {cause}. The memory ends at its last complete step. Free some space, restart from your "
        "checkpoint of a step that the memory holds, and pass resume=<that step>."
    )


def _sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, on systems that can open a folder (Windows cannot)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync files only
            raise
    finally:
        os.close(handle)


def retry_while_in_use(action: Callable[[], Result]) -> Result:
    """Call ``action`` again, for about two seconds, while Windows refuses it because the file is open elsewhere."""
    for pause in RETRIES:
        try:
            return action()
        except PermissionError as error:
            if not is_in_use(error):
                raise
        time.sleep(pause)
    return action()


def is_in_use(error: OSError) -> bool:
    """Whether Windows refused because the file is open; other systems replace and remove open files."""
    return getattr(error, "winerror", None) in IN_USE


def write_bytes(path: Path, data: Any) -> FileEntry:
    """Write a small file."""
    return write_whole(path, lambda out: out.write(data))


def write_parquet(path: Path, table: pa.Table) -> FileEntry:
    """Write an Arrow table."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="lz4", use_dictionary=False, write_statistics=False)  # a millisecond
    return write_bytes(path, sink.getvalue())


def verify(path: Path, entry: FileEntry, *, content: bool) -> None:
    """Raise an error unless a file exists with the size (and, with ``content``, the checksum) in the manifest."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CorruptMemory(f"{path} is missing though the manifest lists it. {_RESTORE}") from None
    if size != entry.bytes:
        raise CorruptMemory(
            f"{path} has {size:,} bytes where the manifest says {entry.bytes:,}: it was cut short. {_RESTORE}"
        )
    if content and (digest := checksum(path)) != entry.xxh3:
        raise CorruptMemory(
            f"{path} has checksum {digest} where the manifest says {entry.xxh3}: its bytes changed. {_RESTORE}"
        )


_RESTORE = "Restore the file from a copy, or resume the recording from a step before it."


def checksum(path: Path) -> str:
    """The xxh3-128 of a file."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        for piece in _pieces(file):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(file: BinaryIO, size: int = 1 << 22) -> Iterable[memoryview]:
    buffer = bytearray(size)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        yield memoryview(buffer)[:count]
