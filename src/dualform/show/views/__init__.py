"""The views of the explorer. Each is a function from a question to a dataclass of plain values, and a template."""

from .attention import AttentionQuestion, attention
from .explorer import BATCH, SETS, ExamplePlace, Explorer, visible
from .heads import attention_layers
from .prediction import ORDERS, AskedTokens, PredictionQuestion, PredictionView, predict
from .render import as_plain, render, style
from .run import run, visits_of
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
from .timed_progress import TimedProgress
from .training import Correctness, TrainingSetQuestion, TrainingSetView, suspects_csv, training_set
from .whatif import WhatIfMasks, WhatIfView, ledger_of, ledger_of_time, what_if
from .work import PendingWork, WorkQueue, pending_in

__all__ = [
    "BATCH",
    "ORDERS",
    "ROWS",
    "SETS",
    "AskedTokens",
    "AttentionQuestion",
    "Correctness",
    "ExamplePlace",
    "Explorer",
    "HeadTrajectory",
    "HeadsView",
    "PendingWork",
    "PredictionQuestion",
    "PredictionView",
    "SeparationQuestion",
    "TimedProgress",
    "TrainingSetQuestion",
    "TrainingSetView",
    "WhatIfMasks",
    "WhatIfView",
    "WorkQueue",
    "as_plain",
    "attention",
    "attention_layers",
    "ledger_of",
    "ledger_of_time",
    "pending_in",
    "predict",
    "render",
    "reports_with",
    "run",
    "separation",
    "style",
    "suspects_csv",
    "through_of",
    "training_set",
    "view_of",
    "visible",
    "visits_of",
    "what_if",
]
