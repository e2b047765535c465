"""Keeps hooks out of compiled graphs, also where ``torch.compile`` traces the training loop around them."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame

P = ParamSpec("P")
R = TypeVar("R")

tracer: Callable[[], Any] = getattr(eval_frame, "get_eval_frame_callback", object)
"""Returns the compiler's callback for this thread, which sees each function before it runs; None where nothing is
compiled. An older torch has no such function: there a compiler may always be active.
"""


def uncompiled(hook: Callable[P, R]) -> Callable[P, R]:
    """Break a compiled graph at a hook: the hook, and everything it calls, runs uncompiled.

    ``torch.compiler.disable`` does the same, but imports the compiler together with dualform, and costs time even where
    nothing is compiled.
    """
    disabled: Any = torch._disable_dynamo(hook)  # pyright: ignore[reportPrivateImportUsage]

    @wraps(hook)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        # while tracing, the compiler takes the first condition as true and does not evaluate the second
        if torch.compiler.is_compiling() or tracer() is not None:
            return disabled(*args, **kwargs)
        return hook(*args, **kwargs)

    return guarded
