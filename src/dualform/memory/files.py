"""Files that appear whole or not at all, with their checksums."""

import errno
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash
from torch import Tensor

from dualform.errors import CorruptMemory, WriteError

SAFETENSORS_NAME = {
    torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip

_DTYPE = {name: dtype for dtype, name in SAFETENSORS_NAME.items()}


@dataclass(frozen=True)
class FileEntry:
    """What the manifest knows of a file."""

    bytes: int
    xxh3: str


DIRECT_FROM = 8 << 20
BOUNCE = 1 << 20
PAGE = 4096


class Out:
    """A file that is being written, with the checksum of what went into it.

    Large files go past the page cache where the system allows it (O_DIRECT): copying gigabytes through the cache would
    take processor time from the training loop. They are then written a megabyte at a time from memory that begins on a
    page.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.hash, self.size = xxhash.xxh3_128(), 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._page: mmap.mmap | None = None
        self._filled = 0
        if size >= DIRECT_FROM and hasattr(os, "O_DIRECT"):
            try:
                self.file = os.open(path, flags | os.O_DIRECT, 0o644)
                self._page = mmap.mmap(-1, BOUNCE)
                return
            except OSError:
                pass  # not every file system does
        self.file = os.open(path, flags, 0o644)

    def write(self, data: Any) -> None:
        """Append some bytes."""
        view = memoryview(data).cast("B")
        self.hash.update(view)
        self.size += len(view)
        while self._page is not None and len(view):
            count = min(len(view), BOUNCE - self._filled)
            self._page[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == BOUNCE:
                self._spill(BOUNCE)
        if self._page is None:
            self._write(view)

    def _spill(self, count: int) -> None:
        assert self._page is not None
        try:
            os.write(self.file, memoryview(self._page)[:count])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._write(memoryview(self._page)[:count])
        self._filled = 0

    def _write(self, view: memoryview) -> None:
        while len(view):
            view = view[os.write(self.file, view) :]

    def finish(self) -> None:
        """Write what is left and force everything to the disk."""
        if self._page is not None and self._filled:
            self._spill(-(-self._filled // PAGE) * PAGE)
            os.ftruncate(self.file, self.size)
        os.fsync(self.file)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.file)


def write_whole(path: Path, fill: Callable[[Out], None], size: int = 0) -> FileEntry:
    """Write ``path`` under a temporary name, force it to the disk, then give it its name."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        out = Out(partial, size)
        try:
            fill(out)
            out.finish()
        finally:
            out.close()
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise WriteError(_why(path, error)) from error
    return FileEntry(out.size, out.hash.hexdigest())


def _why(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cause = "the disk is full"
    else:
        cause = f"the system said: {error.strerror or error}"
    return (
        f"cannot write {path}: {cause}. The memory stands at its last complete step; make room, restart from your "
        "checkpoint of a step it holds and pass resume=<that step>."
    )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, data: Any) -> FileEntry:
    """Write a small file."""
    return write_whole(path, lambda out: out.write(data))


def write_parquet(path: Path, table: pa.Table) -> FileEntry:
    """Write an Arrow table."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return write_bytes(path, sink.getvalue())


def write_tensors(
    path: Path, tensors: Mapping[str, Sequence[Tensor]], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a safetensors file in which each tensor is given as pieces, joined along their first axis.

    The pieces go to the disk one by one: nothing is joined in memory.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, pieces in tensors.items():
        begin, first = end, pieces[0]
        end += sum(piece.numel() * piece.element_size() for piece in pieces)
        rows = [sum(piece.shape[0] for piece in pieces)] if first.ndim else []
        header[name] = {
            "dtype": SAFETENSORS_NAME[first.dtype],
            "shape": rows + list(first.shape[1:]),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)  # the tensors begin on a cache line

    def fill(out: Out) -> None:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for pieces in tensors.values():
            for piece in pieces:
                if piece.numel():
                    out.write(_bytes_of(piece))

    return write_whole(path, fill, size=end)


def map_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, not read but mapped: what is looked at comes from the page cache."""
    whole = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    length = int.from_bytes(bytes(whole[:8].tolist()), "little")
    header = json.loads(whole[8 : 8 + length].numpy().tobytes())
    out = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in about["data_offsets"])
            dtype = _DTYPE[about["dtype"]]
            part = whole[begin:end]
            part = part if begin % dtype.itemsize == 0 else part.clone()  # where it does not begin on a whole number
            out[name] = part.view(dtype).reshape(about["shape"])
    return out


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def verify(path: Path, entry: FileEntry, *, content: bool) -> None:
    """See that a file is there and has the size, and if asked the content, that the manifest gives."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CorruptMemory(f"{path} is missing though the manifest lists it. {_RESTORE}") from None
    if size != entry.bytes:
        raise CorruptMemory(
            f"{path} has {size:,} bytes where the manifest says {entry.bytes:,}: it was cut short. {_RESTORE}"
        )
    if content and (found := checksum(path)) != entry.xxh3:
        raise CorruptMemory(
            f"{path} has checksum {found} where the manifest says {entry.xxh3}: its bytes changed. {_RESTORE}"
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
