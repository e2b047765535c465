"""Networks to train and to ask."""

from .mlp import MLP

__all__ = ["MLP"]
