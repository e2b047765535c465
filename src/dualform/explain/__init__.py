"""Weights to answers: the user's ``Memory``, and what it says."""

from .answers import Certificate, Groups, Hit, Hits, Ledger, Timeline
from .memory import Memory, open_memory
from .spotlight import Spotlight

__all__ = ["Certificate", "Groups", "Hit", "Hits", "Ledger", "Memory", "Spotlight", "Timeline", "open_memory"]
