"""Series as lines over time, one per channel."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

MOST_STEPS, MOST_CHANNELS = 256, 12
"""The most steps and channels of a series that are drawn."""


@dataclass(frozen=True)
class SeriesLines:
    """A series in displayable form. Long series keep every ``stride``-th step, wide ones the first channels."""

    values: tuple[tuple[float, ...], ...]
    """One line per channel."""
    steps: int
    channels: int
    """The number of channels of the series, drawn or not."""
    stride: int
    low: float
    high: float
    """Both ends of the scale, which all series of a set share."""

    def points(self, channel: int) -> str:
        """The points of one channel as SVG, where step t covers the x axis from t to t + 1 and y = 1 is the bottom."""
        span = (self.high - self.low) or 1.0
        values = enumerate(self.values[channel])
        return " ".join(f"{i * self.stride + 0.5:g},{1 - (value - self.low) / span:.3f}" for i, value in values)


def lines_of(x: Float[Tensor, "n channels"], low: float, high: float) -> SeriesLines:
    """A series as lines."""
    stride = -(-len(x) // MOST_STEPS) or 1
    values = x[::stride, :MOST_CHANNELS].T.tolist()
    return SeriesLines(tuple(tuple(line) for line in values), len(x), x.shape[1], stride, low, high)
