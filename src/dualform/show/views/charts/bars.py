"""Charts of bars: one for each thing, or stacked over training time."""

from collections.abc import Sequence

from ..numbers import signed_alike
from .chart import Chart, ChartBar
from .scale import ChartScale, ticks_of

GAP = 0.12
"""The part of a bar's place that stays free, where there are few bars."""


def bar_chart(
    values: Sequence[float], says: Sequence[str], *, alt: str, x_name: str, y_name: str,
    hrefs: Sequence[str] = (), first: int = 1,
) -> Chart:  # fmt: skip
    """One bar for each value, side by side; colours stand for the sign. ``says`` is what each bar tells."""
    scale, wide = ChartScale.around(values), 100 / max(1, len(values))
    gap = GAP * wide if len(values) <= 80 else 0.0
    bars = [
        _bar(scale, i * wide + gap / 2, wide - gap, 0.0, value, _sign(value), says[i], hrefs[i] if hrefs else "")
        for i, value in enumerate(values)
    ]
    places = ticks_of(ChartScale(first - 0.5, first + len(values) - 0.5), 8, upwards=False, whole=True)
    return Chart(alt, places, ticks_of(scale, 5), x_name, y_name, bars, zero=scale.down(0.0))


def stacked_chart(
    edges: Sequence[int], groups: Sequence[tuple[str, str, Sequence[float]]], *, alt: str, y_name: str,
    hrefs: Sequence[str] = (),
) -> Chart:  # fmt: skip
    """Values over stretches of training, stacked upwards and downwards. ``groups`` are (kind, name, values)."""
    count = len(edges) - 1
    ups = [sum(max(0.0, values[i]) for *_, values in groups) for i in range(count)]
    downs = [sum(min(0.0, values[i]) for *_, values in groups) for i in range(count)]
    scale, time = ChartScale.around([*ups, *downs]), ChartScale(edges[0], max(edges[-1], edges[0] + 1))
    bars = []
    for i in range(count):
        up = down = 0.0
        left, right = time.across(edges[i]), time.across(edges[i + 1])
        gap = min(0.2, 0.1 * (right - left))
        for kind, name, values in groups:
            value = values[i]
            if not value:
                continue
            begin = up if value > 0 else down
            of_whom = f"{name}, " if name else ""
            says = f"{of_whom}steps {edges[i] + 1:,} to {edges[i + 1]:,}: {signed_alike([value])[0]}"
            href = hrefs[i] if hrefs else ""
            bars.append(
                _bar(scale, left + gap, right - left - 2 * gap, begin, begin + value, kind or _sign(value), says, href)
            )
            up, down = (up + value, down) if value > 0 else (up, down + value)
    bars = [bar for bar in bars if bar.height]
    keys = [(kind, name) for kind, name, _ in groups if name]
    steps = ticks_of(time, 7, upwards=False, whole=True)
    return Chart(alt, steps, ticks_of(scale, 5), "step of training", y_name, bars, zero=scale.down(0.0), keys=keys)


def _sign(value: float) -> str:
    return "plus" if value >= 0 else "minus"


def _bar(
    scale: ChartScale, x: float, width: float, begin: float, end: float, kind: str, says: str, href: str
) -> ChartBar:  # fmt: skip
    top, bottom = scale.down(max(begin, end)), scale.down(min(begin, end))
    return ChartBar(round(x, 3), top, round(max(width, 0.05), 3), round(max(bottom - top, 0.0), 3), kind, says, href)
