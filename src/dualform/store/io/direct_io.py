"""Bytes on their way to the disk, past the page cache where there are many.

Copying gigabytes through the cache would take processor time from the training loop, so large files are written from
memory that begins on a page (O_DIRECT): from where the bytes lie if they begin on one themselves, else by way of a
buffer.
"""

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

DIRECT_FROM = 8 << 20
PIECE = 1 << 20
PAGE = 4096
BINARY = getattr(os, "O_BINARY", 0)
"""Without this flag Windows writes every newline byte as two bytes; other systems do not have it."""


class DirectFile:
    """A file that is being written; it knows the checksum of what was.

    What is no whole page, and all that follows a write that came back short, goes through the cache.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.size = 0
        self.hash = xxhash.xxh3_128()
        self._page: mmap.mmap | None = None
        self._filled = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY
        self._direct = False
        if size >= DIRECT_FROM and fcntl is not None and hasattr(os, "O_DIRECT"):
            try:
                self.file = os.open(path, flags | os.O_DIRECT, 0o644)
                self._direct = True
                return
            except OSError:
                pass  # not every file system does
        self.file = os.open(path, flags, 0o644)

    def write(self, data: Any) -> None:
        """Append some bytes."""
        source = memoryview(data).cast("B")
        at = np.frombuffer(source, np.uint8).ctypes.data
        while len(source):
            if not self._filled and len(source) >= PAGE and at % PAGE == 0:
                count = min(len(source) // PAGE * PAGE, PIECE)
                self.hash.update(source[:count])
                self._put(source[:count])
            else:
                count = self._pack(source)
            source, at = source[count:], at + count

    def _pack(self, source: memoryview) -> int:
        self._page = self._page or mmap.mmap(-1, PIECE)
        count = min(len(source), PIECE - self._filled)
        room = memoryview(self._page)[self._filled : self._filled + count]
        np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(source[:count], np.uint8))
        self.hash.update(room)  # while it still lies in the cache
        self._filled += count
        if self._filled == PIECE or (self._direct and self._filled % PAGE == 0):  # what follows may begin on a page
            self._spill()
        return count

    def _spill(self) -> None:
        if self._page is not None and self._filled:
            filled, self._filled = self._filled, 0
            self._put(memoryview(self._page)[:filled])

    def _put(self, view: memoryview) -> None:
        """Write memory that begins on a page."""
        self.size += len(view)
        whole = len(view) // PAGE * PAGE if self._direct else 0
        try:
            done = os.write(self.file, view[:whole]) if whole else 0
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            done = 0  # some file systems refuse only now
        if done < len(view) and self._direct and fcntl is not None:
            fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False
        self._write(view[done:])

    def _write(self, view: memoryview) -> None:
        while len(view):
            view = view[os.write(self.file, view) :]

    def finish(self) -> None:
        """Write what is left and force everything to the disk."""
        self._spill()
        os.fsync(self.file)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.file)
