"""A chart as plain values. Places are per cent of the plot, from its left and its upper edge."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tick:
    """A line of the grid with its number."""

    at: float
    text: str


@dataclass(frozen=True)
class ChartBar:
    """A rectangle; ``kind`` is its class: plus, minus, or of-0, of-1, … where colours stand for groups."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    says: str
    """What is shown where one points at it."""
    href: str = ""


@dataclass(frozen=True)
class ChartLine:
    """A line through points, each "x,y" in thousandths of the plot."""

    points: str
    kind: str
    name: str = ""


@dataclass(frozen=True)
class Chart:
    """Bars and lines between two axes."""

    alt: str
    """What can be seen, in a sentence, for those who do not see it."""
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    x_name: str
    y_name: str
    bars: Sequence[ChartBar] = ()
    lines: Sequence[ChartLine] = ()
    zero: float | None = None
    """Where the line of 0 is; None if 0 is not on the axis."""
    keys: Sequence[tuple[str, str]] = ()
    """Kinds and their names."""
