"""The folder of a memory, and which files in it are ours: nothing else is ever removed or written over."""

import re
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dualform.errors import CorruptMemory, FormatVersionError, MemoryLocked, NotAMemory, WriteError

from .format import FORMAT, NAME, Manifest
from .io import is_in_use, retry_while_in_use
from .rank_folders import RANKS, load_manifest

INIT = "init.safetensors"
PARTS = ("shards", "calls", "visits", "steps", "snapshots", "ledger")
SIGN = f"#{FORMAT}"
"""The name of an empty tensor at the head of the first file, which is there before the manifest and goes after it."""

_OURS = re.compile(r"\d{6,}\.(safetensors|parquet)(\.partial)?")


def require_own_folder(folder: Path) -> None:
    """See that a memory may be made here: the folder is new, holds one, or holds nothing that has our names."""
    if not folder.exists():
        return
    if not folder.is_dir() or (folder / NAME).exists():
        try:
            load_manifest(folder)
        except FormatVersionError:
            return
        except CorruptMemory:
            if not _signed(folder):
                raise
    elif not _signed(folder):
        taken = [file for file in (folder / INIT, *_files(folder)) if file.exists()]
        if taken:
            raise NotAMemory(
                f"{taken[0]} has the name of a file of a memory, but {folder} is not a dualform memory. Choose another "
                "path, so that nothing is written over."
            )


def lock_folder(folder: Path) -> FileLock:
    """Make the folder if need be, and hold it alone until the lock is released."""
    lock = FileLock(str(folder / ".lock"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise MemoryLocked(
            f"another recording is writing to {folder}. Wait for it to end, or choose another path."
        ) from None
    except OSError as error:
        raise WriteError(
            f"cannot use the folder {folder}: the system said: {error.strerror or error}. Choose another path."
        ) from error
    return lock


def remove_memory(folder: Path) -> None:
    """Remove the files of a memory: the manifest first, so that it is whole or gone; what it is known by last."""
    _remove(folder / NAME)
    for part in sorted((folder / RANKS).glob("[0-9]" * 4)):
        remove_memory(part)
    for file in _files(folder):
        _remove(file)
    _remove(folder / INIT)


def remove_unlisted(folder: Path, manifest: Manifest) -> None:
    """Remove what the manifest of a memory does not list: of steps that were dropped, or half written."""
    listed = {folder / name for shard in manifest.shards for name in shard.files}
    listed |= {folder / entry.name for entry in manifest.ledgers}
    for file in _files(folder):
        if file not in listed:
            _remove(file)


def _remove(file: Path) -> None:
    try:
        retry_while_in_use(lambda: file.unlink(missing_ok=True))
    except PermissionError as error:
        if not is_in_use(error):
            raise
        raise WriteError(
            f"cannot remove {file}: a memory that is open here or in another program uses it, and this system does not "
            "remove open files. Close it first (in Python: del memory), or choose another path."
        ) from error


def _files(folder: Path) -> list[Path]:
    """The files with names as we give them."""
    inside = [file for part in PARTS for file in sorted((folder / part).glob("*"))]
    return [file for file in inside if _OURS.fullmatch(file.name) and file.is_file()]


def _signed(folder: Path) -> bool:
    """Whether the first file of a memory is there, and ours."""
    with suppress(OSError), open(folder / INIT, "rb") as file:
        return f'{{"{SIGN}"'.encode() in file.read(64)
    return False
