"""Uploaded pictures as tensors."""

from io import BytesIO
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError, require

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
MOST_PIXELS, MOST_SCANS = 16_000_000, 64
"""Limits of uploaded pictures. A small JPEG can hold many scans of the same pixels, which take long to decode."""


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
