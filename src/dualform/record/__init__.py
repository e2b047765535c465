"""A training loop to slots: hooks around the user's own loop, one file a layer kind."""

from .tape import Tape, record

__all__ = ["Tape", "record"]
