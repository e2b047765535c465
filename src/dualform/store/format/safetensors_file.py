"""Tensors in safetensors files: written piece by piece, read by memory mapping."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..io import PAGE, DirectFile, FileEntry, write_whole

SAFETENSORS_NAME = {
    torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip

PAD = "#pad"
"""The prefix of the names of padding tensors."""

_DTYPE = {name: dtype for dtype, name in SAFETENSORS_NAME.items()}


Pieces = Mapping[str, Sequence[Tensor]]
"""Tensors by name, each as pieces to concatenate along the first axis."""


def write_tensors(path: Path, tensors: Pieces, *, paged: bool = False) -> FileEntry:
    """Write a safetensors file. The pieces are written one by one: nothing is concatenated in memory.

    With ``paged`` every tensor begins on a page, so that memory that begins on a page is written without a copy. The
    gaps are filled with padding tensors of bytes.
    """
    header, pads = _header(tensors, PAGE if paged else 1)

    def put(out: DirectFile) -> None:
        out.write(len(header).to_bytes(8, "little"))
        out.write(header)
        for pieces, pad in zip(tensors.values(), pads, strict=True):
            for piece in pieces:
                if piece.numel():
                    out.write(_bytes_of(piece))
            if pad:
                out.write(bytes(pad))

    return write_whole(path, put, size=size_of(tensors))


def file_bytes(tensors: Pieces, *, paged: bool = False) -> int:
    """The size of the file that :func:`write_tensors` writes."""
    header, pads = _header(tensors, PAGE if paged else 1)
    return 8 + len(header) + size_of(tensors) + sum(pads)


def size_of(tensors: Pieces) -> int:
    """The total number of bytes of the tensors."""
    return sum(piece.numel() * piece.element_size() for pieces in tensors.values() for piece in pieces)


def _header(tensors: Pieces, page: int) -> tuple[bytes, list[int]]:
    """The header, and the number of padding bytes after each tensor."""
    header: dict[str, Any] = {}
    end, pads = 0, []
    for name, pieces in tensors.items():
        begin, first = end, pieces[0]
        end += size_of({name: pieces})
        rows = [sum(piece.shape[0] for piece in pieces)] if first.ndim else []
        header[name] = {
            "dtype": SAFETENSORS_NAME[first.dtype],
            "shape": rows + list(first.shape[1:]),
            "data_offsets": [begin, end],
        }
        pads.append(-end % page)
        if pads[-1]:
            header[f"{PAD}{len(pads)}"] = {"dtype": "U8", "shape": pads[-1:], "data_offsets": [end, end + pads[-1]]}
            end += pads[-1]
    text = json.dumps(header).encode()
    return text + b" " * (-(len(text) + 8) % max(page, 64)), pads  # the tensors begin on a cache line, or on a page


def map_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, memory-mapped: bytes are read through the page cache when they are used."""
    content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    length = int.from_bytes(bytes(content[:8].tolist()), "little")
    header = json.loads(content[8 : 8 + length].numpy().tobytes())
    out = {}
    for name, entry in header.items():
        if name != "__metadata__" and not name.startswith(PAD):
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            dtype = _DTYPE[entry["dtype"]]
            data = content[begin:end]
            data = data if begin % dtype.itemsize == 0 else data.clone()  # a view needs an aligned beginning
            out[name] = data.view(dtype).reshape(entry["shape"])
    return out


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
