"""Pictures, texts and bars drawn with characters."""

from collections.abc import Sequence

import torch
from jaxtyping import UInt8
from rich.columns import Columns
from rich.console import Group
from rich.text import Text
from torch import Tensor

from ..examples import Examples, ShownExample

WIDTH = 14
"""The width of a small picture in characters."""

SHADES, LEVELS = " ░▒▓█", "▁▂▃▄▅▆▇█"

CHANNELS = 3
"""The most channels of a series that are shown."""

AROUND = 24
"""How many tokens are shown on either side of the marked one."""


def picture(pixels: UInt8[Tensor, "height width *channels"], columns: int = WIDTH, coloured: bool = True) -> Text:
    """A picture with two pixels per character: coloured half blocks, or shades without colour."""
    image = pixels if pixels.ndim == 3 else pixels.unsqueeze(-1).expand(*pixels.shape, 3)
    rows = max(2, 2 * round(columns * image.shape[0] / image.shape[1] / 2))
    small = torch.nn.functional.interpolate(image.movedim(-1, 0)[None].float(), (rows, columns), mode="area")
    shades = small[0].movedim(0, -1).round().int().tolist()
    text = Text()
    for number, (top, bottom) in enumerate(zip(shades[::2], shades[1::2], strict=True)):
        text.append("\n" if number else "")
        for upper, lower in zip(top, bottom, strict=True):
            if not coloured:
                text.append(SHADES[(len(SHADES) - 1) * sum(upper + lower) // (6 * 255)])
                continue
            text.append("▀", style=f"rgb({','.join(map(str, upper))}) on rgb({','.join(map(str, lower))})")
    return text


def passage(shown: ShownExample) -> Text:
    """A text with the marked tokens in reverse video."""
    mark = shown.mark
    first, last = (0, len(shown.tokens)) if mark is None else (max(0, mark - AROUND), mark + AROUND)
    text = Text("… " if first else "")
    for number, token in enumerate(shown.tokens[first:last], start=first):
        meant = mark is not None and mark <= number < mark + shown.span
        text.append(token.replace("\n", "⏎ "), style="reverse bold" if meant else "")
    return text


def bar(value: float, largest: float, width: int = 10) -> str:
    """A bar to the right of the middle or, for a negative number, to the left."""
    length = round(width * abs(value) / largest) if largest else 0
    if value < 0:
        return f"{'▒' * length:>{width}}│"
    return f"{'':>{width}}│{'█' * length}"


def examples_view(
    examples: Examples, rows: Sequence[int], heads: Sequence[str], positions: Sequence[int | None], coloured: bool
) -> Group:
    """Examples to look at: pictures side by side, texts below each other."""
    if examples.kind == "image":
        pixels = [examples.pixels(examples.row(row)[0]) for row in rows]
        tiles = [Group(picture(image, WIDTH, coloured), head) for image, head in zip(pixels, heads, strict=True)]
        return Group(Columns(tiles, padding=(0, 2)))
    lines = []
    for row, head, position in zip(rows, heads, positions, strict=True):
        shown = examples.shown(row, position=position)
        lines.append(Text.assemble((f"{head}  ", "bold"), _in_words(shown)))
    return Group(*lines)


def _in_words(shown: ShownExample) -> Text:
    """An example that is not a picture, as text."""
    if shown.kind == "text":
        return passage(shown)
    if shown.lines is not None:
        return Text("  ".join(spark(line, shown.lines.low, shown.lines.high) for line in shown.lines.values[:CHANNELS]))
    return Text(", ".join(shown.words[:12] or [f"{x:.3g}" for x in shown.numbers[:12]]))


def spark(values: Sequence[float], low: float, high: float) -> str:
    """One channel of a series, one character per step."""
    top = len(LEVELS) - 1
    shares = [(value - low) / ((high - low) or 1) for value in values]
    return "".join(LEVELS[round(top * min(1, max(0, share)))] for share in shares)
