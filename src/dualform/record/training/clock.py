"""The clock of a recording: how many steps are complete."""

from torch import optim


class Clock:
    """Counts complete steps. A memory that is resumed counts on from the step of its checkpoint."""

    __slots__ = ("_backwards", "_joined", "step")

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self._joined: list[optim.Optimizer] = []
        """The optimisers that have joined in the last step."""
        self._backwards = 0
        """The number of backward passes before it."""

    @property
    def next_step(self) -> int:
        """The step that is under way, or comes next."""
        return self.step + 1

    @property
    def joined(self) -> int:
        """How many optimisers have taken their part of the last step."""
        return len(self._joined)

    def stepped(self, optimizer: optim.Optimizer, backwards: int, open_step: bool) -> None:
        """An optimiser has taken a step: a part of the last one if that is still open, if no further backward pass has
        come since, and if it took no part in it yet.
        """
        is_another = self._joined and all(joined is not optimizer for joined in self._joined)
        if not (is_another and backwards == self._backwards and open_step):
            self.step += 1
            self._joined, self._backwards = [], backwards
        self._joined.append(optimizer)
