"""Bytes on their way to the disk, past the page cache where there are many.

Copying gigabytes through the cache would take processor time from the training loop, so large files are written a
megabyte at a time from memory that begins on a page (O_DIRECT). Packing bytes into such memory and writing it may be
done by two threads: the one that trains packs and goes on, the other waits for the disk (:class:`Feed`).
"""

import errno
import fcntl
import mmap
import os
import queue
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

DIRECT_FROM = 8 << 20
BOUNCE = 1 << 20
PAGE = 4096

POOL = 48
"""Megabytes that may wait for the disk."""


class Pages:
    """A fixed number of megabytes that are used again and again; who wants one more waits."""

    def __init__(self, count: int = POOL) -> None:
        self._left = count
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()

    def take(self) -> mmap.mmap:
        """An empty one."""
        if self._left and self._free.empty():
            self._left -= 1
            return mmap.mmap(-1, BOUNCE)
        return self._free.get()

    def give_back(self, page: mmap.mmap) -> None:
        """It is empty again."""
        self._free.put(page)


class Packer(ABC):
    """Packs bytes into megabytes that begin on a page, and knows the checksum of all of them."""

    def __init__(self) -> None:
        self.hash = xxhash.xxh3_128()
        self._page: mmap.mmap | None = None
        self._filled = 0

    def write(self, data: Any) -> None:
        """Append some bytes."""
        source = np.frombuffer(data, np.uint8)
        while len(source):
            if self._page is None:
                self._page, self._filled = self._empty(), 0
            count = min(len(source), BOUNCE - self._filled)
            room = memoryview(self._page)[self._filled : self._filled + count]
            np.copyto(np.frombuffer(room, np.uint8), source[:count])
            self.hash.update(room)  # while it still lies in the cache
            self._filled += count
            source = source[count:]
            if self._filled == BOUNCE:
                self._spill()

    def _spill(self) -> None:
        """Pass on what is packed."""
        if self._page is not None:
            page, self._page = self._page, None
            self._pass_on(page, self._filled)

    @abstractmethod
    def _empty(self) -> mmap.mmap: ...

    @abstractmethod
    def _pass_on(self, page: mmap.mmap, filled: int) -> None: ...


class Feed(Packer):
    """The content of a file, packed by one thread while another writes it."""

    def __init__(self, pages: Pages, size: int) -> None:
        super().__init__()
        self.pages, self.size = pages, size
        self._ready: queue.SimpleQueue[tuple[mmap.mmap, int] | None] = queue.SimpleQueue()
        self._over = False

    def _empty(self) -> mmap.mmap:
        return self.pages.take()

    def _pass_on(self, page: mmap.mmap, filled: int) -> None:
        self._ready.put((page, filled))

    def end(self) -> None:
        """That was all."""
        self._spill()
        self._ready.put(None)

    def __iter__(self) -> Iterator[memoryview]:
        """What is packed, a megabyte at a time, for the thread that writes."""
        while not self._over:
            ready = self._ready.get()
            if ready is None:
                self._over = True
                return
            page, filled = ready
            try:
                yield memoryview(page)[:filled]
            finally:
                self.pages.give_back(page)

    def into(self, out: "Out") -> None:
        """Write all of it to a file."""
        out.take(self)

    def drain(self) -> None:
        """Nobody will write the rest."""
        for _ in self:
            pass


class Out(Packer):
    """A file that is being written.

    What is no whole page, and all that follows a write that came back short, goes through the cache.
    """

    def __init__(self, path: Path, size: int) -> None:
        super().__init__()
        self.size = 0
        self._own: mmap.mmap | None = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._direct = False
        if size >= DIRECT_FROM and hasattr(os, "O_DIRECT"):
            try:
                self.file = os.open(path, flags | os.O_DIRECT, 0o644)
                self._direct = True
                return
            except OSError:
                pass  # not every file system does
        self.file = os.open(path, flags, 0o644)

    def _empty(self) -> mmap.mmap:
        self._own = self._own or mmap.mmap(-1, BOUNCE)
        return self._own

    def _pass_on(self, page: mmap.mmap, filled: int) -> None:
        self._put(memoryview(page)[:filled])

    def take(self, feed: Feed) -> None:
        """Append all of a feed, which knows its own checksum."""
        try:
            for packed in feed:
                self._put(packed)
        finally:
            feed.drain()
        self.hash = feed.hash

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
        if done < len(view) and self._direct:
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
