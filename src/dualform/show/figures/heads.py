"""Figures of attention heads: what they separate, beside random matrices, and how that comes about in training."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dualform.svm import HeadReport, Report, Trajectory

from .canvas import BLUE, GREY, INK, LINES, ORANGE, STYLES, Figure, clean, empty_axes

CURVES = {
    "norm": "norm of W",
    "above 0.9": "queries with a weight above 0.9",
    "efficiency": "margin efficiency",
    "cosine": "cosine with what separates",
    "effective rank": "effective rank",
    "changed": "queries that select another token",
}
"""What is drawn through training, and what it is called."""

NULLS = {"efficiency": "null efficiency", "cosine": "null cosine"}
"""What random matrices have of it."""


def heads(report: Report) -> Figure:
    """The heads of a layer side by side: saturation, margin efficiency, cosine, and singular values.

    Grey is what random matrices have on the same inputs.
    """
    figure, axes = empty_axes(1, 4, (12.5, 3.1))
    for axis in axes[0]:
        axis.axis("on")
        clean(axis)
    numbers, every = np.arange(len(report)), list(report)
    for i, (level, colour) in enumerate(zip((0.9, 0.99, 0.999), ("#9ecae1", BLUE, INK), strict=True)):
        shares = [each.saturation.above[i] for each in every]
        axes[0, 0].bar(numbers + 0.26 * (i - 1), shares, 0.24, color=colour, label=f"above {level}")
    axes[0, 0].set_ylim(0, 1)
    axes[0, 0].legend(fontsize=7, frameon=False)
    _beside_chance(axes[0, 1], numbers, every, "efficiency")
    axes[0, 1].set_yscale("log")
    _beside_chance(axes[0, 2], numbers, every, "cosine")
    for i, each in enumerate(every):
        singular = each.spectra["own"].singular
        style: dict[str, Any] = {"color": LINES[i % len(LINES)], "linestyle": STYLES[i % len(STYLES)]}
        axes[0, 3].plot(
            np.arange(1, len(singular) + 1), (singular / singular[0]).numpy(), label=str(each.head), **style
        )
    axes[0, 3].set_xlabel("number", fontsize=8)
    axes[0, 3].legend(fontsize=7, frameon=False, title="head", title_fontsize=7)
    titles = ("queries with a largest weight", "margin efficiency", "cosine with what separates", "singular values")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    for axis in axes[0, :3]:
        axis.set_xticks(numbers, [str(each.head) for each in every])
        axis.set_xlabel("head", fontsize=8)
    figure.suptitle(f"What the heads of {report.layer} separate, at {len(every[0].selected)} queries", fontsize=10)
    return figure


def _beside_chance(axis: Any, numbers: np.ndarray, every: Sequence[HeadReport], what: str) -> None:
    """A number of each head in both norms, and of random matrices."""
    for i, each in enumerate(every):
        chance = each.null.efficiencies if what == "efficiency" else each.null.cosines
        axis.plot(np.full(len(chance), numbers[i]), chance.numpy(), "_", color=GREY, ms=14, mew=1.2)
        for found, mark, colour in ((each.found, "o", BLUE), (each.low, "^", ORANGE)):
            if found is not None:
                value = found.efficiency.high if what == "efficiency" else found.cosine
                axis.plot(numbers[i], value, mark, color=colour, ms=6, zorder=3)
    axis.plot([], [], "o", color=BLUE, label="Frobenius")
    axis.plot([], [], "^", color=ORANGE, label="nuclear")
    axis.plot([], [], "_", color=GREY, ms=10, label="random")
    axis.legend(fontsize=7, frameon=False)
    axis.margins(x=0.25)


def heads_through(path: Trajectory, layer: str) -> Figure:
    """The heads of a layer through training, a line each; dotted what random matrices have on the same inputs."""
    figure, axes = empty_axes(2, 3, (11.0, 5.4))
    numbers = [each.head for each in path.reports[0][layer]]
    for axis, (what, title) in zip(axes.flat, CURVES.items(), strict=True):
        axis.axis("on")
        for i, head in enumerate(numbers):
            style: dict[str, Any] = {"color": LINES[i % len(LINES)], "linewidth": 1.6}
            axis.plot(path.steps, path.curve(layer, head, what), label=f"head {head}", marker="o", ms=3, **style)
            if what in NULLS:
                axis.plot(path.steps, path.curve(layer, head, NULLS[what]), ":", color=GREY, linewidth=1.2)
        if what == "efficiency":
            axis.set_yscale("log")
        axis.set_xscale("symlog", linthresh=max(1, path.steps[1] if len(path.steps) > 1 else 1))
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("training step", fontsize=8)
        clean(axis)
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"The heads of {layer} through training", fontsize=10)
    return figure
