"""Optimisers that divide each entry by a number of its own (Adam and its kin): the recurrence run again from slots."""

from .recurrence import (
    ParameterState,
    SlotGroups,
    advance,
    apply_step,
    backward_factors,
    precondition,
    replay,
    state_at,
)
from .scan import scan_backwards

__all__ = [
    "ParameterState",
    "SlotGroups",
    "advance",
    "apply_step",
    "backward_factors",
    "precondition",
    "replay",
    "scan_backwards",
    "state_at",
]
