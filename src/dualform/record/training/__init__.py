"""What happens while a step is trained: backward passes, the change of each parameter, the live ledger."""

from .backward_hooks import BackwardHooks
from .clock import Clock
from .live_ledger import LedgerStep, LiveLedger, states_by_name
from .outside_changes import OutsideChanges
from .parameter_step import NewBatch, ParameterUpdate, factors_of, line_of, new_batches, scales_of
from .rule_audit import RuleAudit
from .warm_up import WarmUpReport

__all__ = [
    "BackwardHooks",
    "Clock",
    "LedgerStep",
    "LiveLedger",
    "NewBatch",
    "OutsideChanges",
    "ParameterUpdate",
    "RuleAudit",
    "WarmUpReport",
    "factors_of",
    "line_of",
    "new_batches",
    "scales_of",
    "states_by_name",
]
