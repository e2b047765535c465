"""Building blocks of figures: axes, colours, pictures and bars.

The colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart. Colour is never the
only carrier of information.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from dualform.errors import require
from dualform.explain.notebook import BLUE, GREEN, ORANGE, PURPLE, VERMILION

from ..text import plain, same_digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any  # matplotlib is an extra: it is imported when a figure is drawn

SKY, GREY, INK = "#56B4E9", "#999999", "#222222"
LINES = [BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION]
HATCHES = ["", "//", ".."]
STYLES = ["-", "--", "-.", ":", "-", "--"]


def empty_axes(rows: int, columns: int, inches: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure with a grid of empty axes."""
    require("matplotlib.figure", "plot")
    from .shown_figure import ShownFigure

    figure = ShownFigure(figsize=inches, dpi=150, layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    return figure, axes


def picture(axis: Any, image: Tensor, below: str, frame: str | None, head: str = "") -> None:
    """Draw an image in a frame, with a heading above and lines of text below."""
    axis.axis("on")
    axis.imshow(image.cpu().numpy(), cmap="gray_r", interpolation="nearest")
    axis.set(xticks=[], yticks=[])
    axis.set_title(head, fontsize=10, fontweight="bold", color=INK, pad=3)
    axis.set_xlabel(below, fontsize=7, color=INK, labelpad=3)
    for spine in axis.spines.values():
        spine.set(color=frame or "#CCCCCC", linewidth=2 if frame else 0.6)


def bars(axis: Any, names: Sequence[str], values: Sequence[float], *, signed: bool, last: bool) -> None:
    """Draw a bar with its number for each value; with ``last`` the last bar is the sum of the others."""
    axis.axis("on")
    colours = [BLUE if value >= 0 else VERMILION for value in values]
    if last:
        colours[-1] = INK
    places = np.arange(len(values))
    axis.barh(places, values, color=colours, height=0.72)
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    texts = same_digits(values) if signed else [plain(value) for value in values]
    for place, value, text in zip(places, values, texts, strict=True):
        axis.annotate(
            text, (value, place), xytext=(3 if value >= 0 else -3, 0), textcoords="offset points", fontsize=8,
            ha="left" if value >= 0 else "right", va="center",
        )  # fmt: skip
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.margins(x=0.18)
    remove_frame(axis)


def remove_frame(axis: Any) -> None:
    """Remove the top and right edges of the frame, and shrink tick labels."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
