"""Frozen weights: a memory keeps a fingerprint of the large ones, and reads the weights from the model later."""

from collections.abc import Mapping

from torch import Tensor, nn

from dualform.store import Store, fingerprint

from ..plan import RecordingPlan
from ..verify import Marks

SMALL, ALL_SMALL = 64 << 10, 1 << 20
"""Frozen parameters of up to so many bytes are kept; all of them, if their total is at most so many bytes."""

CHANGED = (
    "it was frozen as recording began, so only its fingerprint was kept, and it was changed in place: it is kept from "
    "here on, and the steps before need a model that still has its first weights"
)


def fingerprints_of_frozen(plan: RecordingPlan) -> dict[str, str]:
    """Fingerprints of the large parameters that no optimiser has and that take no gradient."""
    frozen = {
        name: tensor
        for name, tensor in plan.rest.items()
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and tensor not in plan.owners
    }
    if sum(map(_bytes_of, frozen.values())) <= ALL_SMALL:
        return {}
    return {name: hexadecimal(tensor) for name, tensor in frozen.items() if _bytes_of(tensor) > SMALL}


def hexadecimal(tensor: Tensor) -> str:
    """A tensor's fingerprint as a manifest keeps it."""
    return f"{fingerprint(tensor):016x}"


class FrozenWeightTracker:
    """Tracks the frozen parameters of which only a fingerprint was kept so far."""

    def __init__(self, plan: RecordingPlan, store: Store, step: int, marks: Marks) -> None:
        self.marks, self._fingerprints = marks, store.manifest.frozen
        self._names = {id(plan.tensors[name]): name for name in store.not_kept(step) if name in plan.tensors}

    def first_value(self, parameter: Tensor, step: int) -> dict[str, Tensor]:
        """An optimiser is about to change a parameter in a step: its first value, under the name it is kept by."""
        name = self._names.pop(id(parameter), None)
        if name is None:
            return {}
        if hexadecimal(parameter) != self._fingerprints[name]:
            self.marks("frozen-changed", name, CHANGED, step)
            return {}
        return {f"{name}@0": parameter.detach().to("cpu", copy=True)}

    def see_changed(self, snapshots: Mapping[str, Tensor], step: int) -> Mapping[str, Tensor]:
        """Mark frozen parameters that are among the snapshots, because they changed; returns the snapshots."""
        for key in snapshots:
            name = key.rpartition("@")[0]
            for identity in [identity for identity, frozen in self._names.items() if frozen == name]:
                del self._names[identity]
                self.marks("frozen-changed", name, CHANGED, step)
        return snapshots


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
