"""Axes: a range of numbers as per cent of a plot, and round numbers for its ticks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..numbers import numbers_alike
from .chart import Tick

STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class ChartScale:
    """Numbers from ``low`` to ``high``."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float], zero: bool = True, room: float = 0.04) -> "ChartScale":
        """A scale that holds all finite values, and 0 if asked for."""
        finite = [value for value in values if math.isfinite(value)] + ([0.0] if zero else [])
        low, high = min(finite, default=0.0), max(finite, default=1.0)
        span = (high - low) or abs(high) or 1.0
        return cls(low - room * span if low < 0 or not zero else low, high + room * span)

    def across(self, value: float) -> float:
        """Per cent from the left."""
        return round(100 * (value - self.low) / (self.high - self.low), 3)

    def down(self, value: float) -> float:
        """Per cent from above."""
        return round(100 - self.across(value), 3)


def ticks_of(scale: ChartScale, most: int, upwards: bool = True, whole: bool = False) -> list[Tick]:
    """Round numbers on a scale, at most so many."""
    span = scale.high - scale.low
    power = 10.0 ** math.floor(math.log10(span / most)) if span > 0 else 1.0
    steps = [step * power for step in STEPS if not whole or (step * power) % 1 == 0] or [10 * power]
    step = next((step for step in steps if span / step <= most), steps[-1] * 2)
    numbers = [i * step for i in range(math.ceil(scale.low / step), math.floor(scale.high / step) + 1)]
    texts = [f"{number:,.0f}" for number in numbers] if whole else numbers_alike(numbers, step)
    return [
        Tick(scale.down(number) if upwards else scale.across(number), text)
        for number, text in zip(numbers, texts, strict=True)
    ]
