"""Methods that adapt a trained vision transformer to a new task, most of them with a frozen backbone."""

from .intermediate import IntermediateProbe
from .lora import LoRA, with_lora
from .probe import Probe
from .prompts import PromptedBlock, with_prompts
from .queries import VisualQueryTuning, summary
from .schedule import scaled_rate, warmup_cosine
from .selection import feature_scores, group_lasso, select
from .tuned import Tuned, trained_parameters

__all__ = [
    "IntermediateProbe",
    "LoRA",
    "Probe",
    "PromptedBlock",
    "Tuned",
    "VisualQueryTuning",
    "feature_scores",
    "group_lasso",
    "scaled_rate",
    "select",
    "summary",
    "trained_parameters",
    "warmup_cosine",
    "with_lora",
    "with_prompts",
]
