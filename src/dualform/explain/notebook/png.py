"""Pictures as PNG, also inside a data URL, without a package for pictures."""

import base64
import struct
import zlib

import numpy as np
from jaxtyping import UInt8
from torch import Tensor


def png(image: UInt8[Tensor, "height width"] | UInt8[Tensor, "height width 3"]) -> bytes:
    """Encode a grey or coloured picture as PNG; 0 is black."""
    height, width, *channels = image.shape
    rows = np.ascontiguousarray(image.numpy()).reshape(height, -1)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], 1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels else 0, 0, 0, 0)
    chunks = [_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(lines, 9)), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_address(image: UInt8[Tensor, "height width"] | UInt8[Tensor, "height width 3"]) -> str:
    """A picture as a data URL, so that a page needs no other file."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
