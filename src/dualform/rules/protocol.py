"""How an optimiser is taught: a function from its settings to a :class:`~dualform.types.Transition`.

Given the state that all examples share, one step of the optimiser is linear in the gradient. A scalar rule writes that
step down for one parameter, from what the optimiser keeps of it::

    def sgdw(group, state):                                     # W ← (1 − ηλ) W − η M,   M ← μ M + g
        lr, mu, decay = group["lr"], group["momentum"], group["weight_decay"]
        return Transition(ww=1 - lr * decay, wm=-lr * mu, mm=mu, wg=-lr, mg=1.0)

    dualform.record(model, optimizer, path, rules={SGDW: Rule("SGDW", sgdw, buffer="momentum_buffer")})

``group`` is the parameter group as it stands when the step begins, ``state`` the optimiser's state of that parameter
then (empty before its first step). The memory keeps the transition itself, step by step: opening it needs no rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dualform.types import Transition


@dataclass(frozen=True)
class Rule:
    """What a step does to a parameter, and where the optimiser keeps the buffer M (None: it keeps none)."""

    name: str
    transition: Callable[[Mapping[str, Any], Mapping[str, Any]], Transition]
    buffer: str | None = None
    reads: tuple[str, ...] = ("lr",)
    """Settings of the parameter group that are worth showing beside the transition."""
