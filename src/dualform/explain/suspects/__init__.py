"""Training examples whose label looks wrong, and how much each example speaks for its own label."""

from .answers import SelfInfluence, Suspect, Suspects
from .find import find_suspects
from .self_influence import self_influence
from .training_set import TrainingSet, training_set

__all__ = [
    "SelfInfluence",
    "Suspect",
    "Suspects",
    "TrainingSet",
    "find_suspects",
    "self_influence",
    "training_set",
]
