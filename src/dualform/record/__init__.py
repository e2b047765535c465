"""A training loop to slots: hooks around the user's own loop, one file a layer kind."""

from .frozen import hexadecimal
from .layers import KINDS, Call, Kind, Point, kind_of, owns_forward
from .tape import Tape, record

__all__ = ["KINDS", "Call", "Kind", "Point", "Tape", "hexadecimal", "kind_of", "owns_forward", "record"]
