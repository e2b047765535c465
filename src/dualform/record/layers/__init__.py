"""One layer kind a file: which linear maps a module applies, and how their inputs and errors are found."""

from .hook import Hook
from .kind import Call, Found, Kind, Map, Point, Watch
from .table import KINDS, computed, kind_of, refusal_of

__all__ = ["KINDS", "Call", "Found", "Hook", "Kind", "Map", "Point", "Watch", "computed", "kind_of", "refusal_of"]
