"""From recorded slots to answers: the user's ``Memory``, its questions and its weights."""

from .answers import GroupRow, Groups, Timeline
from .ask import FEW_GROUPS, ScanAnswers
from .filters import matching
from .groups import stretch_edges
from .hits import ExampleHit, ExampleHits, Hit, HitOrigin, HitPlaces, Hits, SlotHit, SlotHits, VisitHit, VisitHits
from .linear_functional import LinearFunctional
from .memory import Memory, open_memory, survey
from .query import is_preconditioned
from .runs import Comparison, Influence, Metasmoothness, ReplayedRun, Retraining, RunCheck
from .spotlight import Spotlight
from .surveys import SurveyScores
from .suspects import SelfInfluence, Suspect, Suspects
from .weights import Certificate, Ledger

__all__ = [
    "FEW_GROUPS",
    "Certificate",
    "Comparison",
    "ExampleHit",
    "ExampleHits",
    "GroupRow",
    "Groups",
    "Hit",
    "HitOrigin",
    "HitPlaces",
    "Hits",
    "Influence",
    "Ledger",
    "LinearFunctional",
    "Memory",
    "Metasmoothness",
    "ReplayedRun",
    "Retraining",
    "RunCheck",
    "ScanAnswers",
    "SelfInfluence",
    "SlotHit",
    "SlotHits",
    "Spotlight",
    "SurveyScores",
    "Suspect",
    "Suspects",
    "Timeline",
    "VisitHit",
    "VisitHits",
    "is_preconditioned",
    "matching",
    "open_memory",
    "stretch_edges",
    "survey",
]
