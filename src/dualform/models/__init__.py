"""Networks to record and ask."""

from .lstm import LSTMLanguageModel
from .mlp import MLP

__all__ = ["MLP", "LSTMLanguageModel"]
