"""Are the answers right? Scores of any origin, judged by what really happens when examples are left out."""

from .brittleness import Brittleness, brittleness
from .lds import Correlation, RemovalRuns, lds, leave_one_out, removal_runs
from .mislabelled import mislabelled
from .ranks import ranks, spearman

__all__ = [
    "Brittleness",
    "Correlation",
    "RemovalRuns",
    "brittleness",
    "lds",
    "leave_one_out",
    "mislabelled",
    "ranks",
    "removal_runs",
    "spearman",
]
