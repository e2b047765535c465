"""Charts of lines: numbers over the steps of training, or over whatever is counted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..numbers import number
from .chart import Chart, ChartBar, ChartLine
from .scale import ChartScale, ticks_of

MOST_POINTS, STOPS = 400, 60
"""The most points of a drawn line, and how many places tell their values."""


@dataclass(frozen=True)
class Curve:
    """Numbers y over numbers x."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(
    curves: Sequence[Curve], *, alt: str, x_name: str, y_name: str, zero: bool = False, whole: bool = True,
    stairs: bool = False,
) -> Chart:  # fmt: skip
    """Lines over one axis; ``stairs`` holds each number until the next one, as a learning rate does."""
    along = [x for curve in curves for x in curve.x]
    scale = ChartScale.around([y for curve in curves for y in curve.y], zero)
    across = ChartScale(min(along, default=0.0), max([*along, min(along, default=0.0) + 1e-9]))
    lines = [
        ChartLine(_points(_thinned(curve), scale, across, stairs), f"of-{i % 8}", curve.name)
        for i, curve in enumerate(curves)
    ]
    keys = [(line.kind, line.name) for line in lines if line.name]
    return Chart(
        alt, ticks_of(across, 7, upwards=False, whole=whole), ticks_of(scale, 5), x_name, y_name,
        _stops(curves, across, x_name), lines, scale.down(0.0) if scale.low <= 0 <= scale.high else None, keys,
    )  # fmt: skip


def _thinned(curve: Curve) -> Curve:
    every = max(1, math.ceil(len(curve.x) / MOST_POINTS))
    places = [i for i in range(0, len(curve.x), every) if math.isfinite(curve.y[i])]
    return Curve(curve.name, [curve.x[i] for i in places], [curve.y[i] for i in places])


def _points(curve: Curve, scale: ChartScale, across: ChartScale, stairs: bool) -> str:
    points, before = [], None
    for x, y in zip(curve.x, curve.y, strict=True):
        if stairs and before is not None:
            points.append((x, before))
        points.append((x, y))
        before = y
    if stairs and before is not None:
        points.append((across.high, before))
    return " ".join(f"{10 * across.across(x):.1f},{10 * scale.down(y):.1f}" for x, y in points)


def _stops(curves: Sequence[Curve], across: ChartScale, x_name: str) -> list[ChartBar]:
    """Invisible columns that tell the values of all lines above them."""
    longest = max(curves, key=lambda curve: len(curve.x), default=None)
    if longest is None or not longest.x:
        return []
    every = max(1, len(longest.x) // STOPS)
    places = list(range(0, len(longest.x), every))
    middles = [across.across(longest.x[i]) for i in places]
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(middles)), 100.0]
    stops = []
    for stop, i in enumerate(places):
        x = longest.x[i]
        told = [
            f"{curve.name}: {number(curve.y[j])}" if curve.name else number(curve.y[j])
            for curve in curves
            if curve.x and (j := _at(curve.x, x)) is not None
        ]
        says = f"{x_name} {x:,.0f}: {', '.join(told)}"
        stops.append(ChartBar(round(edges[stop], 3), 0.0, round(edges[stop + 1] - edges[stop], 3), 100.0, "stop", says))
    return stops


def _at(xs: Sequence[float], x: float) -> int | None:
    """The last place of a line up to x."""
    return next((j for j in range(len(xs) - 1, -1, -1) if xs[j] <= x), None)
