"""A training loop to slots: hooks around the user's own loop, one file a layer kind."""

from .layers import KINDS, ErrorPoint, LayerKind, ModuleCall, kind_of, owns_forward
from .refusal import recording_refused
from .shards import ShardLimits
from .state import hexadecimal
from .tape import Tape, record

__all__ = [
    "KINDS",
    "ErrorPoint",
    "LayerKind",
    "ModuleCall",
    "ShardLimits",
    "Tape",
    "hexadecimal",
    "kind_of",
    "owns_forward",
    "record",
    "recording_refused",
]
