"""Queries against the store: blocked products with fused reductions, and sums that rebuild what was trained."""

from .attention_sums import fit, key_sums, summed_weights
from .certificate import Agreement, Rounding, agreement, certify, compared, moves, rounding, shaped_parameters
from .coefficients import coefficients
from .dual import dual_forward
from .layer_sums import entries, explained_layers, initial_part, layer_sums
from .parameter_sums import Sum, add_up, dual_output
from .parameters_by_group import Split, split
from .preconditioned.recurrence import GroupOf, State, advance, backwards, move, precondition, replay, state_at
from .preconditioned.scan import scan_backwards
from .reductions import Best, BestOfGroups, GroupSums
from .scan import Queries, scan, weights_of
from .stream import View, stream

__all__ = [
    "Agreement",
    "Best",
    "BestOfGroups",
    "GroupOf",
    "GroupSums",
    "Queries",
    "Rounding",
    "Split",
    "State",
    "Sum",
    "View",
    "add_up",
    "advance",
    "agreement",
    "backwards",
    "certify",
    "coefficients",
    "compared",
    "dual_forward",
    "dual_output",
    "entries",
    "explained_layers",
    "fit",
    "initial_part",
    "key_sums",
    "layer_sums",
    "move",
    "moves",
    "precondition",
    "replay",
    "rounding",
    "scan",
    "scan_backwards",
    "shaped_parameters",
    "split",
    "state_at",
    "stream",
    "summed_weights",
    "weights_of",
]
