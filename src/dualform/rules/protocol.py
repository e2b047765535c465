r"""How to describe an optimiser: the effect of one step on one parameter, as functions of the numbers that it reads.

Given the state that all examples share, one step is linear in the gradient. A *scalar rule* describes this with numbers
alone::

    def sgdw(s):                                                # W ← (1 − ηλ) W − η M,   M ← μ M + g
        return Transition(ww=1 - s["lr"] * s["weight_decay"], wm=-s["lr"] * s["momentum"], mm=s["momentum"],
                          wg=-s["lr"], mg=1.0)

    dualform.record(model, optimizer, path, rules={SGDW: Rule("SGDW", sgdw, buffer="momentum_buffer")})

A *preconditioned rule* also has a linear map P that all examples share, computed at each step from the optimiser's
other state::

    def rms(s, shared, parameter):                              # V ← β V + (1 − β) g²,   W ← W − η g / √V
        v = shared["square_avg"] = s["beta"] * shared.get("square_avg", 0.0) + (1 - s["beta"]) * parameter.gradient**2
        return 1 / (v.sqrt() + s["eps"])

    Rule("RMS", lambda s: Transition(wp=-s["lr"], pg=1.0), shared=("square_avg",), precondition=rms)

A memory stores the numbers and the transitions of every step, so a memory recorded with a scalar rule opens without it;
P is recomputed from the slots, so a preconditioned rule must be passed again to ``dualform.open(path, rules=…)``.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dualform.types import Transition

Settings = Mapping[str, float]
"""The numbers that a step reads."""

Shared = MutableMapping[str, Tensor]
"""State of the optimiser for a parameter that all examples share, by its name in the optimiser."""

_ASIDE = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))


@dataclass(frozen=True)
class Seen:
    """One parameter before a step: its gradient, its weight, the optimiser's buffer M, and its machine precision."""

    gradient: Tensor
    weight: Tensor
    buffer: Tensor
    eps: float


def numbers(group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, float]:
    """All numbers of a parameter group and of the optimiser's state at the beginning of a step.

    The entries of a tuple are numbered: ``betas`` gives ``betas1`` and ``betas2``. Most optimisers have no state of a
    parameter before its first step.
    """
    numbers_by_name: dict[str, float] = {}
    for name, value in (*group.items(), *state.items()):
        if name in _ASIDE or value is None:
            continue
        if isinstance(value, tuple | list):
            numbers_by_name |= {f"{name}{i}": float(v) for i, v in enumerate(value, start=1) if _is_number(v)}
        elif _is_number(value):
            numbers_by_name[name] = float(value)
    return numbers_by_name


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def root(x: Tensor) -> Tensor:
    """The square root, whose derivative is 0 at 0: a running square that is 0 says nothing of its slope."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x.sqrt()
    zeros = x == 0
    return x.masked_fill(zeros, 1.0).sqrt().masked_fill(zeros, 0.0)


def differentiable(settings: Settings) -> str:
    """Nothing of a step lacks a derivative."""
    return ""


@dataclass(frozen=True)
class Rule:
    """The effect of an optimiser's step on a parameter.

    ``transition`` returns its numbers. ``precondition`` returns the map P (None: there is none) and replaces the
    ``shared`` state with the new one, without changing its tensors in place. ``buffer`` is the optimiser's name for M,
    ``settings`` reads the numbers of a step.
    """

    name: str
    transition: Callable[[Settings], Transition]
    buffer: str | None = None
    shared: tuple[str, ...] = ()
    precondition: Callable[[Settings, Shared, Seen], Tensor] | None = None
    acts: Literal["entries", "left"] = "entries"
    """Whether P multiplies entry by entry, or is a matrix that multiplies from the left."""
    local: bool = True
    """Whether entries of P can be computed from the same entries of the gradient and the state alone."""
    reads_gradients: bool = False
    """Whether P is computed from gradients and the shared state, and from W only where decay is added to gradients."""
    decays_by_factor: bool = False
    """Whether the optimiser itself multiplies W by ww, which is then rounded to float32 unless W is more precise."""
    settings: Callable[[Mapping[str, Any], Mapping[str, Any]], Settings] = numbers
    not_differentiable: Callable[[Settings], str] = differentiable
    """What of a step with these settings does not have a derivative everywhere, in a few words; or nothing."""
    signs_only: bool = False
    """Whether a step reads no more than signs of gradients, so that no small change of them changes it."""

    @property
    def state(self) -> tuple[str, ...]:
        """The names of the optimiser's state of a parameter: the buffer and the shared state."""
        return (*([self.buffer] if self.buffer else []), *self.shared)
