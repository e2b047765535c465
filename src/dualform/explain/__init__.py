"""Weights to answers: the user's ``Memory``, and what it says."""

from .answers import Groups, Hit, Hits, Timeline
from .certificate import Certificate
from .ledger import Ledger
from .memory import Memory, open_memory
from .spotlight import Spotlight

__all__ = ["Certificate", "Groups", "Hit", "Hits", "Ledger", "Memory", "Spotlight", "Timeline", "open_memory"]
