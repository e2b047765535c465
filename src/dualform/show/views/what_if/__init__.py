"""The page What if: the network without some of its training."""

from .direct import ledger_of, ledger_of_time, masked_weights, sum_of_shown_groups
from .masks import WhatIfMasks, edges_of, hidden_by
from .page import REMOVED, CounterfactualAnswer, WhatIfView, what_if
from .run_again import cannot_run, training_seconds

__all__ = [
    "REMOVED",
    "CounterfactualAnswer",
    "WhatIfMasks",
    "WhatIfView",
    "cannot_run",
    "edges_of",
    "hidden_by",
    "ledger_of",
    "ledger_of_time",
    "masked_weights",
    "sum_of_shown_groups",
    "training_seconds",
    "what_if",
]
