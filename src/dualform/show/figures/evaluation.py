"""Figures of how right scores are: their LDS, predicted and real changes, removal curves and brittleness.

Each takes the answers of several methods by name, and draws an answer alone as well.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from dualform.errors import QueryError
from dualform.evaluate import Correlation, Flips, LeaveOneOut, MethodTable, RemovalCurve

from .canvas import BLUE, GREY, INK, LINES, STYLES, Figure, empty_axes, remove_frame

Answer = TypeVar("Answer")
COLUMNS = 3
"""How many panels stand side by side."""


def lds(correlations: MethodTable | Mapping[str, Correlation] | Correlation) -> Figure:
    """The linear datamodeling score of each method, with its 95 % interval."""
    parts = correlations.correlations if isinstance(correlations, MethodTable) else correlations
    methods: dict[str, Correlation] = _by_name(parts, Correlation)
    figure, axes = empty_axes(1, 1, (6.5, 0.42 * len(methods) + 1.2))
    axis = axes[0, 0]
    axis.axis("on")
    for place, part in enumerate(methods.values()):
        axis.plot([part.low, part.high], [place, place], color=BLUE, linewidth=2.5, alpha=0.55, solid_capstyle="butt")
        axis.plot(part.mean, place, "o", color=BLUE, markersize=6)
        axis.annotate(
            f"{part.mean:.2f}", (part.mean, place), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8
        )
    axis.set_yticks(range(len(methods)), list(methods), fontsize=9)
    axis.set_ylim(len(methods) - 0.5, -0.7)
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.set_xlim(min(-0.1, *(part.low - 0.05 for part in methods.values())), 1.02)
    first = next(iter(methods.values()))
    axis.set_xlabel("rank correlation with what retraining gave (LDS)", fontsize=9)
    axis.set_title(f"{len(first.per_query)} queries, {first.subsets} subsets; bars: 95 % interval", fontsize=9)
    remove_frame(axis)
    return figure


def leave_one_out(results: Mapping[str, LeaveOneOut] | LeaveOneOut) -> Figure:
    """Predicted against real change when one example is left out: a panel for each method, a dot for each example."""
    methods = _by_name(results, LeaveOneOut)
    columns = min(COLUMNS, len(methods))
    rows = -(-len(methods) // columns)
    figure, axes = empty_axes(rows, columns, (3.3 * columns, 3.4 * rows))
    for axis, (name, part) in zip(axes.flat, methods.items(), strict=False):
        axis.axis("on")
        predicted, real = part.predicted.flatten().numpy(), part.real.flatten().numpy()
        axis.scatter(predicted, real, s=12, color=BLUE, alpha=0.6, linewidths=0, zorder=2)
        limits = axis.get_xlim(), axis.get_ylim()  # scores may be in any unit: the line must not set the scale
        axis.axline((0, 0), slope=1, color=GREY, linewidth=1, zorder=1)
        axis.set(xlim=limits[0], ylim=limits[1])
        axis.set_title(f"{name + ': ' if name else ''}rank correlation {part.correlation:.2f}", fontsize=9)
        axis.set_xlabel("predicted change", fontsize=9)
        axis.ticklabel_format(axis="both", style="sci", scilimits=(-3, 4))
        remove_frame(axis)
    for row in axes:
        row[0].set_ylabel("real change, retrained", fontsize=9)
    return figure


def subset_removal(results: Mapping[str, RemovalCurve] | RemovalCurve) -> Figure:
    """The mean change of the target without the top examples of each method, and without random ones.

    Shaded: 95 % intervals over queries.
    """
    methods = _by_name(results, RemovalCurve)
    figure, axes = empty_axes(1, 1, (6.5, 3.6))
    axis = axes[0, 0]
    axis.axis("on")
    for rank, (name, part) in enumerate(methods.items()):
        style = {"color": LINES[rank % len(LINES)], "linestyle": STYLES[rank % len(STYLES)]}
        low, high = zip(*part.intervals(), strict=True)
        axis.fill_between(part.counts, low, high, color=style["color"], alpha=0.15, linewidth=0)
        axis.plot(part.counts, part.mean.numpy(), marker="o", markersize=3.5, label=name or "the top", **style)
    first = next(iter(methods.values()))
    random = first.random.mean(0).numpy()
    axis.plot(first.counts, random, color=GREY, marker="s", markersize=3, linewidth=1.2, label="random examples")
    axis.axhline(0, color=INK, linewidth=0.6)
    axis.set_xscale("log")
    axis.set_xticks(first.counts, [str(count) for count in first.counts])
    axis.minorticks_off()
    axis.set_xlabel("number of examples left out", fontsize=9)
    axis.set_ylabel("mean change of the target", fontsize=9)
    axis.set_title(f"Retrained without the top examples of {len(first.changes)} queries", fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    remove_frame(axis)
    return figure


def flips(results: Mapping[str, Flips] | Flips) -> Figure:
    """The share of answers that flip when at most so many examples go, by the scores that chose them."""
    methods = _by_name(results, Flips)
    figure, axes = empty_axes(1, 1, (6.5, 3.6))
    axis = axes[0, 0]
    axis.axis("on")
    most = max(part.most for part in methods.values())
    for rank, (name, part) in enumerate(methods.items()):
        style = {"color": LINES[rank % len(LINES)], "linestyle": STYLES[rank % len(STYLES)]}
        counts = sorted({number for number in part.removed if number is not None})
        places = [1, *counts, part.most]
        shares = [part.share(count) for count in places]
        axis.step(places, shares, where="post", label=name or "the top", linewidth=1.8, **style)
    axis.set(ylim=(0, 1.02), xlim=(1, max(2, most)))
    axis.set_xscale("log")
    ticks = [count for count in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000) if count <= most]
    axis.set_xticks(ticks, [f"{count:,}" for count in ticks])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    count = len(next(iter(methods.values())).removed)
    axis.set_xlabel("examples left out before retraining, at most", fontsize=9)
    axis.set_title(f"Share of {count} answers that flip", fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    remove_frame(axis)
    return figure


def _by_name(results: Any, kind: type[Answer]) -> dict[str, Answer]:
    methods = dict(results) if isinstance(results, Mapping) else {"": results}
    wrong = [name for name, part in methods.items() if not isinstance(part, kind)]
    if wrong or not methods:
        raise QueryError(f"pass {{'name of the method': {kind.__name__}, …}}, or one {kind.__name__} alone.")
    return methods
