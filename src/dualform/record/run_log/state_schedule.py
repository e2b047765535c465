"""After which steps whole states are kept, so that they fit into a budget however long training becomes."""

A_STEP = 256 << 10
"""At first states are kept so often that they take about so many bytes a step …"""

RARELY = 64
"""… or every so many steps, where they are larger: to write a state takes less time than a step."""


class StateSchedule:
    """Keeps at most ``most`` states at equal distances. When there are too many, every other one goes, and from then on
    states are kept half as often. ``size`` is that of a state.
    """

    def __init__(self, most: int, kept: tuple[int, ...] = (), size: int = 0) -> None:
        self.most, self.kept = most, list(kept)
        first = min(1 << (size // A_STEP).bit_length(), RARELY)
        self.every = min((b - a for a, b in zip((0, *kept), kept, strict=False)), default=first)

    def due(self, step: int) -> bool:
        """Whether the state after this step is to be kept."""
        return self.most > 0 and step % self.every == 0

    def add(self, step: int) -> set[int]:
        """The state after a step is kept; returns the steps whose states are to be removed for it."""
        self.kept.append(step)
        dropped: set[int] = set()
        while len(self.kept) > self.most:
            self.every *= 2
            dropped |= {step for step in self.kept if step % self.every}
            self.kept = [step for step in self.kept if step % self.every == 0]
        return dropped
