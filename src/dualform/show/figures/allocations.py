"""A figure of allocations: which key/value heads the query heads used in training."""

import numpy as np

from dualform.attention import Allocations
from dualform.errors import QueryError

from .canvas import LINES, Figure, empty_axes, remove_frame

COLUMNS = 4
"""How many layers stand side by side."""


def allocations(history: Allocations) -> Figure:
    """Shares of the query heads through training, one panel per layer; each band is a key/value head, the first lowest.

    Layers without a forward pass in training are left out.
    """
    layers = [layer for layer in history.layers if len(history[layer])]
    if not layers:
        raise QueryError("no forward pass in training was noted, so there is nothing to draw.")
    columns = min(COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    figure, axes = empty_axes(rows, columns, (2.0 + 2.6 * columns, 0.6 + 2.2 * rows))
    for axis, layer in zip(axes.flat, layers, strict=False):
        axis.axis("on")
        shares = history.shares(layer).numpy()
        steps = np.arange(len(shares) + 1)  # a pass is a step wide, so that one alone shows
        top = np.zeros(len(steps))
        for group in range(shares.shape[1]):
            band = np.append(shares[:, group], shares[-1, group])
            axis.fill_between(
                steps, top, top + band, step="post", color=LINES[group % len(LINES)],
                alpha=1.0 if group < len(LINES) else 0.55, linewidth=0, label=str(group),
            )  # fmt: skip
            top = top + band
            axis.step(steps, top, where="post", color="white", linewidth=0.6)
        axis.set(xlim=(0, steps[-1]), ylim=(0, 1))
        axis.set_title(layer or "the layer", fontsize=9)
        axis.set_xlabel("pass", fontsize=8)
        remove_frame(axis)
    axes[0, 0].set_ylabel("share of query heads", fontsize=8)
    handles, names = max((axis.get_legend_handles_labels() for axis in axes.flat), key=lambda legend: len(legend[1]))
    figure.legend(
        handles[::-1], names[::-1], loc="outside right upper", fontsize=7, frameon=False, title="key/value head",
        title_fontsize=7,
    )  # fmt: skip
    return figure
