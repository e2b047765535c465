"""Charts with axes, values that appear where one points, and links: plain values, drawn by one macro."""

from .bars import bar_chart, stacked_chart
from .chart import Chart, ChartBar, ChartLine, Tick
from .curves import Curve, line_chart
from .scale import ChartScale, ticks_of

__all__ = [
    "Chart",
    "ChartBar",
    "ChartLine",
    "ChartScale",
    "Curve",
    "Tick",
    "bar_chart",
    "line_chart",
    "stacked_chart",
    "ticks_of",
]
