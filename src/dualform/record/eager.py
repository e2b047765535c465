"""Hooks run as they stand, also where ``torch.compile`` traces the training loop around them."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(hook: Callable[P, R]) -> Callable[P, R]:
    """Keep a hook, and all that it calls, out of compiled graphs: the graph breaks there. Costs a microsecond a call.

    ``torch.compiler.disable`` does the same, but imports the compiler together with dualform.
    """
    disabled: Any = torch._disable_dynamo(hook)  # pyright: ignore[reportPrivateImportUsage]
    return disabled
