"""Are the answers right? Scores of any origin, judged by what really happens when examples are left out."""

from . import baselines
from .brittleness import Brittleness, Flips, brittleness, flips
from .lds import Correlation, lds
from .leave_one_out import LeaveOneOut, leave_one_out
from .methods import MethodTable, table
from .mislabelled import Detection, mislabelled
from .ranks import ranks, spearman
from .removal_runs import RemovalRuns, removal_runs
from .scores import as_matrix, average
from .subset_removal import RemovalCurve, subset_removal

__all__ = [
    "Brittleness",
    "Correlation",
    "Detection",
    "Flips",
    "LeaveOneOut",
    "MethodTable",
    "RemovalCurve",
    "RemovalRuns",
    "as_matrix",
    "average",
    "baselines",
    "brittleness",
    "flips",
    "lds",
    "leave_one_out",
    "mislabelled",
    "ranks",
    "removal_runs",
    "spearman",
    "subset_removal",
    "table",
]
