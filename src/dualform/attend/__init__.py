"""Queries against the store: blocked products with fused reductions, and sums that rebuild what was trained."""

from .certify import Agreement, Rounding, agreement, certify, compared, moves, rounding, shaped_parameters
from .coefficients import coefficients
from .dual import dual_forward
from .keysums import fit, key_sums, summed_weights
from .parameters import entries, explained_layers, initial_part, layer_sums
from .rebuild import Sum, add_up, dual_output
from .reduce import Best, BestOfGroups, GroupSums
from .replay import GroupOf, State, advance, backwards, move, precondition, replay, state_at
from .scan import Queries, scan, weights_of
from .split import Split, split
from .stream import View, Watch, stream
from .sweep import scan_backwards

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
    "Watch",
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
