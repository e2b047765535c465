"""Figures of attention heads: what they separate, compared with random matrices, and how that develops in training."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dualform.svm import HeadReport, Report, Trajectory

from .canvas import BLUE, GREY, INK, LINES, ORANGE, STYLES, Figure, empty_axes, remove_frame

CURVES = {
    "norm": "norm of W",
    "above 0.9": "queries with a weight above 0.9",
    "efficiency": "margin efficiency",
    "cosine": "cosine with what separates",
    "effective rank": "effective rank",
    "changed": "queries that select another token",
}
"""The curves that are drawn through training, with their titles."""

NULLS = {"efficiency": "null efficiency", "cosine": "null cosine"}
"""The curves of random matrices, for comparison."""


def heads(report: Report) -> Figure:
    """The heads of a layer side by side: saturation, margin efficiency, cosine, and singular values.

    The grey marks are random matrices on the same inputs.
    """
    figure, axes = empty_axes(1, 4, (12.5, 3.1))
    for axis in axes[0]:
        axis.axis("on")
        remove_frame(axis)
    numbers, head_reports = np.arange(len(report)), list(report)
    for i, (level, colour) in enumerate(zip((0.9, 0.99, 0.999), ("#9ecae1", BLUE, INK), strict=True)):
        shares = [head.saturation.above[i] for head in head_reports]
        axes[0, 0].bar(numbers + 0.26 * (i - 1), shares, 0.24, color=colour, label=f"above {level}")
    axes[0, 0].set_ylim(0, 1)
    axes[0, 0].legend(fontsize=7, frameon=False)
    _beside_chance(axes[0, 1], numbers, head_reports, "efficiency")
    axes[0, 1].set_yscale("log")
    _beside_chance(axes[0, 2], numbers, head_reports, "cosine")
    for i, head in enumerate(head_reports):
        singular = head.spectra["own"].singular
        style: dict[str, Any] = {"color": LINES[i % len(LINES)], "linestyle": STYLES[i % len(STYLES)]}
        axes[0, 3].plot(
            np.arange(1, len(singular) + 1), (singular / singular[0]).numpy(), label=str(head.head), **style
        )
    axes[0, 3].set_xlabel("number", fontsize=8)
    axes[0, 3].legend(fontsize=7, frameon=False, title="head", title_fontsize=7)
    titles = ("queries with a largest weight", "margin efficiency", "cosine with what separates", "singular values")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    for axis in axes[0, :3]:
        axis.set_xticks(numbers, [str(head.head) for head in head_reports])
        axis.set_xlabel("head", fontsize=8)
    figure.suptitle(
        f"What the heads of {report.layer} separate, at {len(head_reports[0].selected)} queries", fontsize=10
    )
    return figure


def _beside_chance(axis: Any, numbers: np.ndarray, head_reports: Sequence[HeadReport], quantity: str) -> None:
    """Draw a quantity of each head in both norms, and of random matrices."""
    for i, head in enumerate(head_reports):
        chance = head.null.efficiencies if quantity == "efficiency" else head.null.cosines
        axis.plot(np.full(len(chance), numbers[i]), chance.numpy(), "_", color=GREY, ms=14, mew=1.2)
        for fit, mark, colour in ((head.found, "o", BLUE), (head.low, "^", ORANGE)):
            if fit is not None:
                value = fit.efficiency.high if quantity == "efficiency" else fit.cosine
                axis.plot(numbers[i], value, mark, color=colour, ms=6, zorder=3)
    axis.plot([], [], "o", color=BLUE, label="Frobenius")
    axis.plot([], [], "^", color=ORANGE, label="nuclear")
    axis.plot([], [], "_", color=GREY, ms=10, label="random")
    axis.legend(fontsize=7, frameon=False)
    axis.margins(x=0.25)


def heads_through(path: Trajectory, layer: str) -> Figure:
    """The heads of a layer through training, one line each; dotted lines are random matrices on the same inputs."""
    figure, axes = empty_axes(2, 3, (11.0, 5.4))
    numbers = [head.head for head in path.reports[0][layer]]
    for axis, (curve, title) in zip(axes.flat, CURVES.items(), strict=True):
        axis.axis("on")
        for i, head in enumerate(numbers):
            style: dict[str, Any] = {"color": LINES[i % len(LINES)], "linewidth": 1.6}
            axis.plot(path.steps, path.curve(layer, head, curve), label=f"head {head}", marker="o", ms=3, **style)
            if curve in NULLS:
                axis.plot(path.steps, path.curve(layer, head, NULLS[curve]), ":", color=GREY, linewidth=1.2)
        if curve == "efficiency":
            axis.set_yscale("log")
        axis.set_xscale("symlog", linthresh=max(1, path.steps[1] if len(path.steps) > 1 else 1))
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("training step", fontsize=8)
        remove_frame(axis)
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"The heads of {layer} through training", fontsize=10)
    return figure
