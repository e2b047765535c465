"""Weights to answers: the user's ``Memory``, and what it says."""

from .answers import Groups, Hit, Hits, Timeline
from .certificate import Certificate
from .contributions import is_preconditioned
from .filters import matching
from .groups import stretch_edges
from .ledger import Ledger
from .linear_functional import LinearFunctional
from .memory import Memory, open_memory
from .spotlight import ScanAnswers, Spotlight

__all__ = [
    "Certificate",
    "Groups",
    "Hit",
    "Hits",
    "Ledger",
    "LinearFunctional",
    "Memory",
    "ScanAnswers",
    "Spotlight",
    "Timeline",
    "is_preconditioned",
    "matching",
    "open_memory",
    "stretch_edges",
]
