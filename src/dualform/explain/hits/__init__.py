"""The best hits of each query: training examples, visits or single slots."""

from .answers import ExampleHit, ExampleHits, Hit, HitOrigin, Hits, SlotHit, SlotHits, VisitHit, VisitHits
from .of_slots import slot_hits, visit_columns
from .of_sums import INDEX, Summands
from .places import HitPlaces

__all__ = [
    "INDEX",
    "ExampleHit",
    "ExampleHits",
    "Hit",
    "HitOrigin",
    "HitPlaces",
    "Hits",
    "SlotHit",
    "SlotHits",
    "Summands",
    "VisitHit",
    "VisitHits",
    "slot_hits",
    "visit_columns",
]
