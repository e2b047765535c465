"""Queries against the store: blocked products with fused reductions, and sums that rebuild trained parameters."""

from .attention_sums import key_sums, summed_weights, sums_fit_in_memory
from .certificate import (
    Agreement,
    Rounding,
    agreement,
    certify,
    compare,
    count_moves,
    preconditioned_parameters,
    rounding,
)
from .coefficients import coefficients
from .dual import dual_forward
from .example_gradients import example_products, extended_matrix, kronecker_factors, solve_fisher, usual_damping
from .group_sums import GroupSums
from .layer_sums import explained_layers, initial_part, layer_sums, parameter_entries
from .parameter_sums import ParameterSum, dual_output, parameter_sum
from .parameters_by_group import split_by_group
from .preconditioned import (
    ParameterState,
    SlotGroups,
    advance,
    apply_step,
    backward_factors,
    factor_matrix,
    precondition,
    rerun_from_slots,
    row_sums_backwards,
    scaled_errors,
    scan_backwards,
    state_at,
)
from .row_sums import RowSums
from .scan import LayerQueries, LayerScan, Reduction, Scores, scan, scan_together
from .stream import StoreView, decoded, stream
from .top_slots import TopSlots, TopSlotsByGroup

__all__ = [
    "Agreement",
    "GroupSums",
    "LayerQueries",
    "LayerScan",
    "ParameterState",
    "ParameterSum",
    "Reduction",
    "Rounding",
    "RowSums",
    "Scores",
    "SlotGroups",
    "StoreView",
    "TopSlots",
    "TopSlotsByGroup",
    "advance",
    "agreement",
    "apply_step",
    "backward_factors",
    "certify",
    "coefficients",
    "compare",
    "count_moves",
    "decoded",
    "dual_forward",
    "dual_output",
    "example_products",
    "explained_layers",
    "extended_matrix",
    "factor_matrix",
    "initial_part",
    "key_sums",
    "kronecker_factors",
    "layer_sums",
    "parameter_entries",
    "parameter_sum",
    "precondition",
    "preconditioned_parameters",
    "rerun_from_slots",
    "rounding",
    "row_sums_backwards",
    "scaled_errors",
    "scan",
    "scan_backwards",
    "scan_together",
    "solve_fisher",
    "split_by_group",
    "state_at",
    "stream",
    "summed_weights",
    "sums_fit_in_memory",
    "usual_damping",
]
