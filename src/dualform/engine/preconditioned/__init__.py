"""Optimisers with a preconditioner (Adam and others): their recurrence, run again from the recorded slots."""

from .backward_factors import backward_factors
from .forward_sweep import rerun_from_slots, state_at
from .recurrence import ParameterState, advance, apply_step, precondition
from .row_sums import row_sums_backwards
from .scan import factor_matrix, scaled_errors, scan_backwards
from .slot_gradients import SlotGradients, SlotGroups

__all__ = [
    "ParameterState",
    "SlotGradients",
    "SlotGroups",
    "advance",
    "apply_step",
    "backward_factors",
    "factor_matrix",
    "precondition",
    "rerun_from_slots",
    "row_sums_backwards",
    "scaled_errors",
    "scan_backwards",
    "state_at",
]
