"""Pictures, texts and bars in a terminal."""

from collections.abc import Sequence

import torch
from jaxtyping import UInt8
from rich.columns import Columns
from rich.console import Group
from rich.text import Text
from torch import Tensor

from ..examples import Examples, ShownExample

WIDTH = 14
"""Columns of a small picture."""

SHADES, LEVELS = " ░▒▓█", "▁▂▃▄▅▆▇█"

CHANNELS = 3
"""Channels of a series that are shown."""

AROUND = 24
"""Tokens that are shown on either side of the one that is meant."""


def picture(pixels: UInt8[Tensor, "height width *channels"], columns: int = WIDTH, coloured: bool = True) -> Text:
    """A picture, two pixels a character: half blocks, the lower pixel behind the upper one; or shades."""
    image = pixels if pixels.ndim == 3 else pixels.unsqueeze(-1).expand(*pixels.shape, 3)
    rows = max(2, 2 * round(columns * image.shape[0] / image.shape[1] / 2))
    small = torch.nn.functional.interpolate(image.movedim(-1, 0)[None].float(), (rows, columns), mode="area")
    shades = small[0].movedim(0, -1).round().int().tolist()
    text = Text()
    for i, (top, bottom) in enumerate(zip(shades[::2], shades[1::2], strict=True)):
        text.append("\n" if i else "")
        for upper, lower in zip(top, bottom, strict=True):
            if not coloured:
                text.append(SHADES[(len(SHADES) - 1) * sum(upper + lower) // (6 * 255)])
                continue
            text.append("▀", style=f"rgb({','.join(map(str, upper))}) on rgb({','.join(map(str, lower))})")
    return text


def passage(shown: ShownExample) -> Text:
    """Tokens, with those that are meant in reverse."""
    mark = shown.mark
    first, last = (0, len(shown.tokens)) if mark is None else (max(0, mark - AROUND), mark + AROUND)
    text = Text("… " if first else "")
    for i, token in enumerate(shown.tokens[first:last], start=first):
        meant = mark is not None and mark <= i < mark + shown.span
        text.append(token.replace("\n", "⏎ "), style="reverse bold" if meant else "")
    return text


def bar(value: float, largest: float, width: int = 10) -> str:
    """A bar to the right or, for a negative number, to the left of the middle."""
    length = round(width * abs(value) / largest) if largest else 0
    if value < 0:
        return f"{'▒' * length:>{width}}│"
    return f"{'':>{width}}│{'█' * length}"


def looks(
    examples: Examples, rows: Sequence[int], heads: Sequence[str], positions: Sequence[int | None], coloured: bool
) -> Group:
    """Some examples to look at: pictures side by side, texts below each other."""
    if examples.kind == "image":
        pixels = [examples.pixels(examples.row(row)[0]) for row in rows]
        tiles = [Group(picture(each, WIDTH, coloured), head) for each, head in zip(pixels, heads, strict=True)]
        return Group(Columns(tiles, padding=(0, 2)))
    told = []
    for row, head, position in zip(rows, heads, positions, strict=True):
        shown = examples.shown(row, position=position)
        told.append(Text.assemble((f"{head}  ", "bold"), _in_words(shown)))
    return Group(*told)


def _in_words(shown: ShownExample) -> Text:
    """An example that is no picture, on a line or a few."""
    if shown.kind == "text":
        return passage(shown)
    if shown.lines is not None:
        return Text("  ".join(spark(line, shown.lines.low, shown.lines.high) for line in shown.lines.values[:CHANNELS]))
    return Text(", ".join(f"{x:.3g}" for x in shown.numbers[:12]))


def spark(values: Sequence[float], low: float, high: float) -> str:
    """A line of a series, a character a step."""
    top = len(LEVELS) - 1
    shares = [(value - low) / ((high - low) or 1) for value in values]
    return "".join(LEVELS[round(top * min(1, max(0, share)))] for share in shares)
