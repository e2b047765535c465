"""The clock of a recording: how many steps are complete."""


class Clock:
    """Counts complete steps. A memory that is resumed counts on from the step of its checkpoint."""

    __slots__ = ("step",)

    def __init__(self, step: int = 0) -> None:
        self.step = step

    @property
    def next_step(self) -> int:
        """The step that is under way, or comes next."""
        return self.step + 1

    def tick(self) -> None:
        """A step is complete."""
        self.step += 1
