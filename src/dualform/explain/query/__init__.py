"""From inputs to a question: a forward pass, a target, and the queries of each layer."""

from .capture import Capture, MapCalls, apply, capture, run_model
from .labelled import LabelledTarget, labelled
from .logits import examples_first, logits_of
from .model_inputs import first_axis
from .model_shadow import shadow_of
from .question import Question, is_preconditioned
from .targets import Target, choose, target_key

__all__ = [
    "Capture",
    "LabelledTarget",
    "MapCalls",
    "Question",
    "Target",
    "apply",
    "capture",
    "choose",
    "examples_first",
    "first_axis",
    "is_preconditioned",
    "labelled",
    "logits_of",
    "run_model",
    "shadow_of",
    "target_key",
]
