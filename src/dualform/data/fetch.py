"""Downloads with checksums: a file appears whole or not at all, and an interrupted download is resumed."""

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dualform.errors import DataNotFound
from dualform.progress import is_quiet

from .sources import Source

PIECE = 1 << 16
SECONDS = 30.0
"""The timeout of a connection that sends nothing."""


def fetch(source: Source, file: Path) -> Path:
    """Download a file from the first address that has it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(f".{file.name}.lock")):
            if not file.exists():  # another process may have been faster
                _from_any(source, file)
    except OSError as error:
        raise DataNotFound(
            f"Downloading {file.name} failed: cannot write to {file.parent}: {error.strerror or error}. Free some "
            "space, or choose another folder with XDG_CACHE_HOME."
        ) from error
    return file


def _from_any(source: Source, file: Path) -> None:
    failed = []
    for address in source.addresses:
        try:
            _from_one(address, source, file)
            return
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            ConnectionError,
            TimeoutError,
            WrongDownload,
        ) as error:
            failed.append(f"{address} ({getattr(error, 'reason', None) or error or type(error).__name__})")
    raise DataNotFound(
        f"Downloading {file.name} failed: {'; '.join(failed)}. Check the network and try again; the download resumes."
    )


class WrongDownload(Exception):
    """The downloaded data is not the expected file."""


def _from_one(address: str, source: Source, file: Path) -> None:
    partial = file.with_name(f"{file.name}.partial")
    begin = partial.stat().st_size if partial.exists() else 0
    if begin > source.size:
        begin = 0
    if begin < source.size:
        request = urllib.request.Request(address, headers={"Range": f"bytes={begin}-"} if begin else {})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            begin = begin if answer.status == http.client.PARTIAL_CONTENT else 0  # some servers only send all of it
            _copy(answer, partial, begin, source.size)
    kind, expected = source.checksum.split(":")
    checksum = _checksum(kind, partial)
    if checksum != expected:
        partial.unlink()
        raise WrongDownload(f"its {kind} is {checksum}, not {expected}")
    partial.replace(file)


def _copy(answer: http.client.HTTPResponse, partial: Path, begin: int, size: int) -> None:
    with _bar() as progress, partial.open("r+b" if begin else "wb") as out:
        out.truncate(begin)
        out.seek(begin)
        task = progress.add_task(partial.stem, total=size, completed=begin)
        while piece := answer.read(PIECE):
            out.write(piece)
            progress.advance(task, len(piece))
        if out.tell() < size:
            raise WrongDownload(f"the connection ended after {out.tell():,} of {size:,} bytes")


def _bar() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=is_quiet())


def _checksum(kind: str, file: Path) -> str:
    make: Callable[[], hashlib._Hash] = {"sha256": hashlib.sha256, "md5": hashlib.md5}[kind]
    total = make()
    with file.open("rb") as data:
        while piece := data.read(1 << 20):
            total.update(piece)
    return total.hexdigest()
