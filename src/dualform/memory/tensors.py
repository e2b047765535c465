"""Tensors in files: the safetensors format, written piece by piece and read by mapping."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .files import FileEntry, write_whole
from .out import Packer

SAFETENSORS_NAME = {
    torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip

_DTYPE = {name: dtype for dtype, name in SAFETENSORS_NAME.items()}


Pieces = Mapping[str, Sequence[Tensor]]
"""Tensors by name, each as pieces that are joined along their first axis."""


def write_tensors(path: Path, tensors: Pieces) -> FileEntry:
    """Write a safetensors file. The pieces go to the disk one by one: nothing is joined in memory."""
    return write_whole(path, partial(put_tensors, tensors), size=size_of(tensors))


def put_tensors(tensors: Pieces, out: Packer) -> None:
    """The content of a safetensors file."""
    header = _header(tensors)
    out.write(len(header).to_bytes(8, "little"))
    out.write(header)
    for pieces in tensors.values():
        for piece in pieces:
            if piece.numel():
                out.write(_bytes_of(piece))


def size_of(tensors: Pieces) -> int:
    """How many bytes the tensors hold."""
    return sum(piece.numel() * piece.element_size() for pieces in tensors.values() for piece in pieces)


def _header(tensors: Pieces) -> bytes:
    header: dict[str, Any] = {}
    end = 0
    for name, pieces in tensors.items():
        begin, first = end, pieces[0]
        end += size_of({name: pieces})
        rows = [sum(piece.shape[0] for piece in pieces)] if first.ndim else []
        header[name] = {
            "dtype": SAFETENSORS_NAME[first.dtype],
            "shape": rows + list(first.shape[1:]),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    return text + b" " * (-(len(text) + 8) % 64)  # the tensors begin on a cache line


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
