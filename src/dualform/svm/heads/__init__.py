"""Reports on the heads of real attention layers: which tokens they select, and the matrix that separates those."""

from .attention_calls import LossOfOutput, look, seen_layers
from .head_findings import HeadReport, SupportToken
from .origin import DirectionGroup, Origin, origin, source_of
from .report import Report, report, reports
from .report_text import COLUMNS, LEGEND, as_table, cells, is_separating, sentences, verdict

__all__ = [
    "COLUMNS",
    "LEGEND",
    "DirectionGroup",
    "HeadReport",
    "LossOfOutput",
    "Origin",
    "Report",
    "SupportToken",
    "as_table",
    "cells",
    "is_separating",
    "look",
    "origin",
    "report",
    "reports",
    "seen_layers",
    "sentences",
    "source_of",
    "verdict",
]
