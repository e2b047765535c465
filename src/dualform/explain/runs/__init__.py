"""A recorded training that can be run again, and its answers."""

from .answers import Comparison, Influence, RunCheck
from .replayed_run import ReplayedRun

__all__ = ["Comparison", "Influence", "ReplayedRun", "RunCheck"]
