"""After which steps whole states are kept, so that they fit into a budget however long training becomes."""


class StateSchedule:
    """Keeps at most ``most`` states at equal distances. When there are too many, every other one goes, and from then on
    states are kept half as often.
    """

    def __init__(self, most: int, kept: tuple[int, ...] = ()) -> None:
        self.most, self.kept = most, list(kept)
        self.every = min((b - a for a, b in zip((0, *kept), kept, strict=False)), default=1)

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
