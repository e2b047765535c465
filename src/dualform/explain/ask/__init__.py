"""Questions to one layer or to the whole network: what is asked, the pass over the slots, and the answers."""

from .asked import AskedQuestions, ScanAnswers, require_count
from .one_layer import ask_layer, step_coefficients, sum_layer_weights
from .places import ask_places
from .whole_network import FEW_GROUPS, ask_network

__all__ = [
    "FEW_GROUPS",
    "AskedQuestions",
    "ScanAnswers",
    "ask_layer",
    "ask_network",
    "ask_places",
    "require_count",
    "step_coefficients",
    "sum_layer_weights",
]
