"""Checkpoints: now and then all that a preconditioned rule reads is kept, so that steps can be computed from there."""

from collections.abc import Callable, Mapping

from torch import Tensor

from ..plan import RecordingPlan

SHARE = 4
"""The next checkpoint is kept when slots have taken this many times its bytes."""


class StateCheckpoints:
    """Decides when the next checkpoint is due. ``states`` returns the optimisers' state of each explained parameter,
    and is None if another process keeps the checkpoints.
    """

    def __init__(self, plan: RecordingPlan, states: Callable[[], Mapping[str, Mapping[str, Tensor]]] | None) -> None:
        self.plan, self.states = plan, states
        self.names = [n for n in plan.explained if (rule := plan.rule(n)) is not None and rule.precondition is not None]
        self._since = 0

    def due(self, step: int, bytes_more: int) -> dict[str, Tensor]:
        """Copies of all tensors of a checkpoint, under their names in the memory; nothing if none is due.

        ``bytes_more`` is the size of the slots since the last call.
        """
        self._since += bytes_more
        if not self.names or self.states is None:
            return {}
        tensors = self._tensors(self.states())
        if self._since < SHARE * sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()):
            return {}
        self._since = 0
        return {f"{name}@{step}": tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def size(self) -> int:
        """The bytes of a checkpoint."""
        tensors = self._tensors(self.states()) if self.names and self.states is not None else {}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def _tensors(self, states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        weights = {name: self.plan.tensors[name] for name in self.names}
        return weights | {f"{name}#{key}": t for name in self.names for key, t in states.get(name, {}).items()}
