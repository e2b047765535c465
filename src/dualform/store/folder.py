"""The folder of a memory, and which files in it belong to dualform: no other file is ever removed or overwritten."""

import re
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dualform.errors import CorruptMemory, FormatVersionError, MemoryLocked, NotAMemory, WriteError

from .format import FORMAT, NAME, Manifest
from .io import is_in_use, retry_while_in_use
from .rank_folders import RANKS, load_manifest

INIT = "init.safetensors"
SUBFOLDERS = ("shards", "calls", "visits", "steps", "snapshots", "ledger", "run_log", "states", "generators")
SIGN = f"#{FORMAT}"
"""The name of an empty tensor in the header of ``init.safetensors``.

That file is written before the manifest and removed after it, so the folder is recognised even without a manifest.
"""

_FILE_NAME = re.compile(r"\d{6,}\.(safetensors|parquet)(\.partial)?")


def require_own_folder(folder: Path) -> None:
    """Raise an error unless a memory may be created here.

    The folder must be new, hold a memory, or hold no file with a name that dualform would write.
    """
    if not folder.exists():
        return
    if not folder.is_dir() or (folder / NAME).exists():
        try:
            load_manifest(folder)
        except FormatVersionError:
            return
        except CorruptMemory:
            if not _has_sign(folder):
                raise
    elif not _has_sign(folder):
        clashes = [file for file in (folder / INIT, *_dualform_files(folder)) if file.exists()]
        if clashes:
            raise NotAMemory(
                f"{clashes[0]} has the name of a file of a memory, but {folder} is not a dualform memory. Choose "
                "another path, so that nothing is overwritten."
            )


def lock_folder(folder: Path) -> FileLock:
    """Create the folder if necessary, and lock it until the lock is released."""
    lock = FileLock(str(folder / ".lock"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise MemoryLocked(
            f"another recording is writing to {folder}. Wait until it ends, or choose another path."
        ) from None
    except OSError as error:
        raise WriteError(
            f"cannot use the folder {folder}: the operating system reports: {error.strerror or error}. "
            "Choose another path."
        ) from error
    return lock


def remove_memory(folder: Path) -> None:
    """Remove the files of a memory.

    The manifest goes first, so that the memory is complete or gone; the file by which it is recognised goes last.
    """
    _remove(folder / NAME)
    for rank in sorted((folder / RANKS).glob("[0-9]" * 4)):
        remove_memory(rank)
    for file in _dualform_files(folder):
        _remove(file)
    _remove(folder / INIT)


def remove_unlisted(folder: Path, manifest: Manifest) -> None:
    """Remove the files that the manifest does not list: those of dropped steps, and half-written ones."""
    listed = {folder / name for shard in manifest.shards for name in shard.files}
    listed |= {folder / entry.name for entry in manifest.ledgers}
    listed |= {folder / entry.name for entry in (manifest.run_log.states if manifest.run_log else ())}
    for file in _dualform_files(folder):
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


def _dualform_files(folder: Path) -> list[Path]:
    """The files whose names have the form that dualform writes."""
    files = [file for subfolder in SUBFOLDERS for file in sorted((folder / subfolder).glob("*"))]
    return [file for file in files if _FILE_NAME.fullmatch(file.name) and file.is_file()]


def _has_sign(folder: Path) -> bool:
    """Whether ``init.safetensors`` is there and was written by dualform."""
    with suppress(OSError), open(folder / INIT, "rb") as file:
        return f'{{"{SIGN}"'.encode() in file.read(64)
    return False
