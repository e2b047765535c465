"""A recorded training that can be run again, and its answers."""

from .answers import Influence, RunCheck
from .comparison import Comparison
from .metasmoothness import Metasmoothness
from .replayed_run import ReplayedRun
from .retraining import Retraining

__all__ = ["Comparison", "Influence", "Metasmoothness", "ReplayedRun", "Retraining", "RunCheck"]
