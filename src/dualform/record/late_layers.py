"""Layers that join the optimiser while recording runs (``add_param_group``) are recorded from then on.

The memory is written to disk, its manifest lists the new layers, and recording goes on from there, as after a resume.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from dualform.store import Store

from .plan import RecordingPlan
from .state import is_kept

NOT_RECORDED = (
    "it joined the optimiser after recording began, and its layer cannot be recorded from there on (several processes, "
    "a ledger, a gradient that waits for its step, or weights that were changed before): it is kept as snapshots, "
    "unattributed"
)


def late_layers(plan: RecordingPlan, grown: RecordingPlan) -> list[str]:
    """The parameters that a new plan explains and that belong to the rest in the old one."""
    rest = {name: id(tensor) for name, tensor in plan.rest.items()}
    return [name for name in grown.explained if rest.get(name) == id(grown.tensors[name])]


def unchanged_since_start(store: Store, names: Iterable[str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether parameters are unchanged since recording began, so that slots from now on explain them fully."""
    return all(is_kept(store, name, 0, tensors[name]) for name in names)
