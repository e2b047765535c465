"""How the recorder attaches to the user's objects: hooks that no copy inherits, wrapped methods, interrupts."""

from .interrupts import Interrupts
from .method_wrapper import wrapped_method
from .model_shadow import is_opaque, probe_shadow
from .picklable_hook import Hook
from .uncompiled import uncompiled

__all__ = ["Hook", "Interrupts", "is_opaque", "probe_shadow", "uncompiled", "wrapped_method"]
