"""How the recorder attaches to the user's objects: hooks that no copy inherits, wrapped methods, interrupts."""

from .interrupts import Interrupts
from .method_wrapper import wrapped_method
from .own_hooks import is_own_hook
from .picklable_hook import Hook
from .probe_shadow import is_opaque, probe_shadow
from .uncompiled import uncompiled

__all__ = ["Hook", "Interrupts", "is_opaque", "is_own_hook", "probe_shadow", "uncompiled", "wrapped_method"]
