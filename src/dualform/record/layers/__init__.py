"""One layer kind a file: which linear maps a module applies, and how their inputs and errors are found."""

from ..hooks.picklable_hook import Hook
from .protocol import Call, Found, Kind, Map, Point, Unseen, Watch
from .table import KINDS, computed, kind_of, owns_forward, refusal_of

__all__ = [
    "KINDS",
    "Call",
    "Found",
    "Hook",
    "Kind",
    "Map",
    "Point",
    "Unseen",
    "Watch",
    "computed",
    "kind_of",
    "owns_forward",
    "refusal_of",
]
