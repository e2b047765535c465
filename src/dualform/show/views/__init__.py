"""The views of the explorer. Each is a function from a question to a dataclass of plain values, and a template."""

from .attention import AttentionQuestion, attention
from .compare import CompareQuestion, CompareView, compare
from .example import ExampleView, training_example
from .explorer import BATCH, SETS, ExamplePlace, Explorer, visible
from .heads import attention_layers
from .prediction import ORDERS, AskedTokens, PredictionQuestion, PredictionView, predict
from .render import as_plain, render, style
from .run import run
from .selection import Selection
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
from .training import (
    Correctness,
    MapView,
    Showing,
    SortOrder,
    Subset,
    TrainingSetQuestion,
    TrainingSetView,
    TrainingSummary,
    example_map,
    selection_csv,
    shown_indices,
    suspects_csv,
    training_examples,
    training_set,
    training_summary,
)
from .what_if import REMOVED, WhatIfMasks, WhatIfView, ledger_of, ledger_of_time, what_if
from .work import PendingWork, WorkQueue, pending_in

__all__ = [
    "BATCH",
    "ORDERS",
    "REMOVED",
    "ROWS",
    "SETS",
    "AskedTokens",
    "AttentionQuestion",
    "CompareQuestion",
    "CompareView",
    "Correctness",
    "ExamplePlace",
    "ExampleView",
    "Explorer",
    "HeadTrajectory",
    "HeadsView",
    "MapView",
    "PendingWork",
    "PredictionQuestion",
    "PredictionView",
    "Selection",
    "SeparationQuestion",
    "Showing",
    "SortOrder",
    "Subset",
    "TimedProgress",
    "TrainingSetQuestion",
    "TrainingSetView",
    "TrainingSummary",
    "WhatIfMasks",
    "WhatIfView",
    "WorkQueue",
    "as_plain",
    "attention",
    "attention_layers",
    "compare",
    "example_map",
    "ledger_of",
    "ledger_of_time",
    "pending_in",
    "predict",
    "render",
    "reports_with",
    "run",
    "selection_csv",
    "separation",
    "shown_indices",
    "style",
    "suspects_csv",
    "through_of",
    "training_example",
    "training_examples",
    "training_set",
    "training_summary",
    "view_of",
    "visible",
    "what_if",
]
