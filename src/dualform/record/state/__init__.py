"""What is kept beside slots: first and frozen weights, snapshots, optimiser state; new and resumed memories."""

from . import state_checkpoints
from .create import create_memory, state_tensors, states_of
from .frozen_weights import hexadecimal
from .resume import demote_again, is_kept, resume_memory
from .state_keeper import StateKeeper

__all__ = [
    "StateKeeper",
    "create_memory",
    "demote_again",
    "hexadecimal",
    "is_kept",
    "resume_memory",
    "state_checkpoints",
    "state_tensors",
    "states_of",
]
