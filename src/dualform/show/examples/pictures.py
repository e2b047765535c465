"""Pictures: tensors to PNG, and files that people bring to tensors."""

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
"""What a picture may have; a JPEG can say the same pixels over and over again, in scans."""


def png(image: UInt8[Tensor, "height width"] | UInt8[Tensor, "height width 3"]) -> bytes:
    """A grey or coloured picture as a PNG file, black at 0."""
    height, width, *channels = image.shape
    rows = np.ascontiguousarray(image.numpy()).reshape(height, -1)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], 1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels else 0, 0, 0, 0)
    chunks = [_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(lines, 9)), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_address(image: UInt8[Tensor, "height width"] | UInt8[Tensor, "height width 3"]) -> str:
    """A picture that stands in a page itself."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def read_picture(
    data: bytes, size: tuple[int, int], channels: int, invert: bool | None
) -> Float[Tensor, "height width channels"]:
    """A picture that somebody brought, cut to the network's shape, from 0 to 1.

    ``invert`` turns black into white; None does so where a grey picture has a light ground and the network's have a
    dark one, as handwriting on paper.
    """
    module = require("PIL.Image", "web")
    if data[:2] == b"\xff\xd8" and data.count(b"\xff\xda") > MOST_SCANS:
        raise QueryError("this JPEG has more scans than a picture needs; save it anew.")
    try:
        with module.open(BytesIO(data), formats=FORMATS) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise QueryError(
                    f"the picture has {opened.width} × {opened.height} pixels; at most {MOST_PIXELS:,} are taken."
                )
            picture = _flat(module, opened).convert("RGB" if channels == 3 else "L")
    except (OSError, SyntaxError, ValueError, module.DecompressionBombError) as error:
        raise QueryError(f"this is no picture that can be read; {', '.join(FORMATS)} can.") from error
    height, width = size
    side = min(picture.width / width, picture.height / height)
    left, top = (picture.width - side * width) / 2, (picture.height - side * height) / 2
    box = (left, top, left + side * width, top + side * height)
    pixels = np.asarray(picture.resize((width, height), module.Resampling.BOX, box=box), dtype=np.float32) / 255
    found = torch.from_numpy(pixels.copy()).reshape(height, width, channels)
    light = channels == 1 and float(torch.cat([found[0], found[-1], found[:, 0], found[:, -1]]).mean()) > 0.5
    return 1 - found if (light if invert is None else invert) else found


def _flat(module: Any, picture: Any) -> Any:
    """A picture without holes: what is transparent is white."""
    if picture.mode not in ("RGBA", "LA") and "transparency" not in picture.info:
        return picture
    layer = picture.convert("RGBA")
    return module.alpha_composite(module.new("RGBA", layer.size, "white"), layer)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
