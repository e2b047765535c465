"""Writing files that bypass the page cache if they are large.

Copying gigabytes through the page cache would take CPU time from the training loop. So large files are written with
O_DIRECT, which needs memory that begins on a page: the data themselves where they do, else a buffer that they are
copied to.
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
    """A file that is being written, with the checksum of what was written so far.

    Bytes that do not fill a page, and everything after a write that came back short, go through the page cache.
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
                pass  # not every file system supports it
        self.file = os.open(path, flags, 0o644)

    def write(self, data: Any) -> None:
        """Append bytes."""
        source = memoryview(data).cast("B")
        address = np.frombuffer(source, np.uint8).ctypes.data
        while len(source):
            if not self._filled and len(source) >= PAGE and address % PAGE == 0:
                count = min(len(source) // PAGE * PAGE, PIECE)
                self.hash.update(source[:count])
                self._put(source[:count])
            else:
                count = self._buffer(source)
            source, address = source[count:], address + count

    def _buffer(self, source: memoryview) -> int:
        self._page = self._page or mmap.mmap(-1, PIECE)
        count = min(len(source), PIECE - self._filled)
        target = memoryview(self._page)[self._filled : self._filled + count]
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source[:count], np.uint8))
        self.hash.update(target)  # while it is still in the CPU cache
        self._filled += count
        if self._filled == PIECE or (self._direct and self._filled % PAGE == 0):  # the next bytes may begin on a page
            self._flush_buffer()
        return count

    def _flush_buffer(self) -> None:
        if self._page is not None and self._filled:
            filled, self._filled = self._filled, 0
            self._put(memoryview(self._page)[:filled])

    def _put(self, view: memoryview) -> None:
        """Write memory that begins on a page."""
        self.size += len(view)
        full_pages = len(view) // PAGE * PAGE if self._direct else 0
        try:
            done = os.write(self.file, view[:full_pages]) if full_pages else 0
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            done = 0  # some file systems reject O_DIRECT only at the first write
        if done < len(view) and self._direct and fcntl is not None:
            fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False
        self._write(view[done:])

    def _write(self, view: memoryview) -> None:
        while len(view):
            view = view[os.write(self.file, view) :]

    def finish(self) -> None:
        """Write what is buffered and flush the file to the disk."""
        self._flush_buffer()
        os.fsync(self.file)

    def close(self) -> None:
        """Close the file."""
        os.close(self.file)
