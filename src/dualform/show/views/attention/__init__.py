"""The pages Attention and Heads: where a layer looks, what it recalls, and what its heads separate."""

from .heads import attention_layers
from .page import AttentionQuestion, AttentionView, attention
from .separation import (
    ROWS,
    HeadsView,
    HeadTrajectory,
    SeparationQuestion,
    reports_with,
    separation,
    through_of,
    view_of,
)

__all__ = [
    "ROWS",
    "AttentionQuestion",
    "AttentionView",
    "HeadTrajectory",
    "HeadsView",
    "SeparationQuestion",
    "attention",
    "attention_layers",
    "reports_with",
    "separation",
    "through_of",
    "view_of",
]
