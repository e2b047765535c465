"""Stations: now and then all that a preconditioned rule reads is kept whole, and steps can be run again from there."""

from collections.abc import Callable, Mapping

from torch import Tensor

from ..plan import RecordingPlan

SHARE = 4
"""Slots take this many times the bytes of a station before the next one is kept."""


class StateCheckpoints:
    """Knows when the next one is due. ``states`` gives what the optimisers keep of each explained parameter; None where
    another process keeps the stations.
    """

    def __init__(self, plan: RecordingPlan, states: Callable[[], Mapping[str, Mapping[str, Tensor]]] | None) -> None:
        self.plan, self.states = plan, states
        self.names = [n for n in plan.explained if (rule := plan.rule(n)) is not None and rule.precondition is not None]
        self._since = 0

    def due(self, step: int, bytes_more: int) -> dict[str, Tensor]:
        """Copies of all that is to be kept after a step, under the names it is kept by; nothing if it is not time yet.

        ``bytes_more`` is what slots took since the last call.
        """
        self._since += bytes_more
        if not self.names or self.states is None:
            return {}
        found = self._found(self.states())
        if self._since < SHARE * sum(tensor.numel() * tensor.element_size() for tensor in found.values()):
            return {}
        self._since = 0
        return {f"{name}@{step}": tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}

    def size(self) -> int:
        """The bytes of a station by now."""
        found = self._found(self.states()) if self.names and self.states is not None else {}
        return sum(tensor.numel() * tensor.element_size() for tensor in found.values())

    def _found(self, states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        found = {name: self.plan.tensors[name] for name in self.names}
        return found | {f"{name}#{key}": t for name in self.names for key, t in states.get(name, {}).items()}
