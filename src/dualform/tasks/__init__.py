"""The loss and the data of common training loops: ``memory.replay(model, *dualform.tasks.classification(x, y))``.

A memory holds neither. Each function here gives both, so that the recorded training comes out bit for bit.
"""

from .lightning import lightning
from .shares import Task
from .supervised import classification, regression
from .trainer import of_trainer, optimizer_of
from .transformers import causal_lm, sequence_classification

__all__ = [
    "Task",
    "causal_lm",
    "classification",
    "lightning",
    "of_trainer",
    "optimizer_of",
    "regression",
    "sequence_classification",
]
