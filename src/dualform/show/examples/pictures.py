"""Pictures: tensors to PNG, and uploaded files to tensors."""

import base64
import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from dualform.errors import QueryError, require

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
MOST_PIXELS, MOST_SCANS = 16_000_000, 64
"""Limits of uploaded pictures. A small JPEG can hold many scans of the same pixels, which take long to decode."""


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


def read_picture(
    data: bytes, size: tuple[int, int], channels: int, invert: bool | None
) -> Float[Tensor, "height width channels"]:
    """Decode an uploaded picture, crop and resize it to the network's shape, and scale it to 0 to 1.

    ``invert`` turns black into white; None does so if a grey picture has a light background, as handwriting on paper.
    """
    module = require("PIL.Image", "web")
    if data[:2] == b"\xff\xd8" and data.count(b"\xff\xda") > MOST_SCANS:
        raise QueryError(f"this JPEG has more than {MOST_SCANS} scans. Save it again as an ordinary JPEG or PNG.")
    try:
        with module.open(BytesIO(data), formats=FORMATS) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise QueryError(
                    f"the picture has {opened.width} × {opened.height} pixels, more than the limit of {MOST_PIXELS:,}."
                )
            picture = _flat(module, opened).convert("RGB" if channels == 3 else "L")
    except (OSError, SyntaxError, ValueError, module.DecompressionBombError) as error:
        raise QueryError(f"this file cannot be read as a picture. Use one of {', '.join(FORMATS)}.") from error
    height, width = size
    side = min(picture.width / width, picture.height / height)
    left, top = (picture.width - side * width) / 2, (picture.height - side * height) / 2
    box = (left, top, left + side * width, top + side * height)
    pixels = np.asarray(picture.resize((width, height), module.Resampling.BOX, box=box), dtype=np.float32) / 255
    image = torch.from_numpy(pixels.copy()).reshape(height, width, channels)
    light = channels == 1 and float(torch.cat([image[0], image[-1], image[:, 0], image[:, -1]]).mean()) > 0.5
    return 1 - image if (light if invert is None else invert) else image


def _flat(module: Any, picture: Any) -> Any:
    """The picture with white in place of transparent pixels."""
    if picture.mode not in ("RGBA", "LA") and "transparency" not in picture.info:
        return picture
    layer = picture.convert("RGBA")
    return module.alpha_composite(module.new("RGBA", layer.size, "white"), layer)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
