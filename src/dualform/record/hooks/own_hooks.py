"""Which hooks of a model belong to dualform. A copy of the model that is run beside it must not have them."""

from functools import partial
from types import FunctionType, MethodType
from typing import Any

PACKAGES = ("dualform.record", "dualform.explain")
"""The packages that put hooks on modules."""


def is_own_hook(hook: Any) -> bool:
    """Whether dualform put this hook on a module, to record it or to ask it."""
    while isinstance(hook, partial | MethodType):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    module = hook.__module__ if isinstance(hook, FunctionType) else type(hook).__module__
    return str(module).startswith(PACKAGES)
