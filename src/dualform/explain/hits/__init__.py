"""The best hits of each query: training examples, visits or single slots."""

from .answers import ExampleHit, ExampleHits, Hit, Hits, SlotHit, SlotHits, VisitHit, VisitHits
from .of_slots import slot_hits, visit_columns
from .of_sums import Summands

__all__ = [
    "ExampleHit",
    "ExampleHits",
    "Hit",
    "Hits",
    "SlotHit",
    "SlotHits",
    "Summands",
    "VisitHit",
    "VisitHits",
    "slot_hits",
    "visit_columns",
]
