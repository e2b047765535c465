"""From inputs to a question: a forward pass, a target, and what each layer is asked."""

from .capture import Capture, MapCalls, apply, capture, run_model
from .example_axis import first_axis
from .layer_queries import LayerQuestion
from .model_shadow import shadow_of
from .targets import Target, choose, examples_first, logits_of, target_key

__all__ = [
    "Capture",
    "LayerQuestion",
    "MapCalls",
    "Target",
    "apply",
    "capture",
    "choose",
    "examples_first",
    "first_axis",
    "logits_of",
    "run_model",
    "shadow_of",
    "target_key",
]
