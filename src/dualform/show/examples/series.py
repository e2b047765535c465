"""Series as lines: one a channel, over time."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

MOST_STEPS, MOST_CHANNELS = 256, 12
"""Steps and channels of a series that are drawn."""


@dataclass(frozen=True)
class SeriesLines:
    """A series to look at. Of long ones every ``stride``-th step is drawn, of wide ones the first channels."""

    values: tuple[tuple[float, ...], ...]
    """One line a channel."""
    steps: int
    channels: int
    """How many it has in all."""
    stride: int
    low: float
    high: float
    """The ends of the scale, which all series of a set share."""

    def points(self, channel: int) -> str:
        """A line as SVG draws it, where step t is the column from t to t + 1, and 1 is the bottom."""
        span = (self.high - self.low) or 1.0
        values = enumerate(self.values[channel])
        return " ".join(f"{i * self.stride + 0.5:g},{1 - (value - self.low) / span:.3f}" for i, value in values)


def lines_of(x: Float[Tensor, "n channels"], low: float, high: float) -> SeriesLines:
    """A series as lines."""
    stride = -(-len(x) // MOST_STEPS) or 1
    values = x[::stride, :MOST_CHANNELS].T.tolist()
    return SeriesLines(tuple(tuple(line) for line in values), len(x), x.shape[1], stride, low, high)
