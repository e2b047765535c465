"""Hooks run as they stand, also where ``torch.compile`` traces the training loop around them."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame

P = ParamSpec("P")
R = TypeVar("R")

tracer: Callable[[], Any] = getattr(eval_frame, "get_eval_frame_callback", object)
"""What looks at each function of this thread before it runs; None where nothing is compiled. An older torch does not
tell: then something may always be.
"""


def uncompiled(hook: Callable[P, R]) -> Callable[P, R]:
    """Keep a hook, and all that it calls, out of compiled graphs: the graph breaks there.

    ``torch.compiler.disable`` does the same, but imports the compiler together with dualform, and takes its time also
    where nothing is compiled.
    """
    disabled: Any = torch._disable_dynamo(hook)  # pyright: ignore[reportPrivateImportUsage]

    @wraps(hook)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        # a tracer takes the first for true, and knows nothing of the second
        if torch.compiler.is_compiling() or tracer() is not None:
            return disabled(*args, **kwargs)
        return hook(*args, **kwargs)

    return guarded
