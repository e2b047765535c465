r"""How an optimiser is taught: what one step does to one parameter, as functions of the numbers that the step reads.

Given the state that all examples share, one step is linear in the gradient. A *scalar rule* writes that down with
numbers alone::

    def sgdw(s):                                                # W ← (1 − ηλ) W − η M,   M ← μ M + g
        return Transition(ww=1 - s["lr"] * s["weight_decay"], wm=-s["lr"] * s["momentum"], mm=s["momentum"],
                          wg=-s["lr"], mg=1.0)

    dualform.record(model, optimizer, path, rules={SGDW: Rule("SGDW", sgdw, buffer="momentum_buffer")})

A *preconditioned rule* also has a linear map P that all examples share, made anew at each step from the optimiser's
other state::

    def rms(s, shared, seen):                                   # V ← β V + (1 − β) g²,   W ← W − η g / √V
        v = shared["square_avg"] = s["beta"] * shared.get("square_avg", 0.0) + (1 - s["beta"]) * seen.gradient**2
        return 1 / (v.sqrt() + s["eps"])

    Rule("RMS", lambda s: Transition(wp=-s["lr"], pg=1.0), shared=("square_avg",), precondition=rms)

A memory keeps the numbers and the transitions of every step, so what was recorded under a scalar rule opens without it;
P is made again from the slots, so a preconditioned rule has to be given again to ``dualform.open(path, rules=…)``.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from dualform.types import Transition

Settings = Mapping[str, float]
"""The numbers that a step reads."""

Shared = MutableMapping[str, Tensor]
"""State that the optimiser keeps of a parameter and that all examples share, by its name in the optimiser."""

_ASIDE = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))


@dataclass(frozen=True)
class Seen:
    """One parameter as a step finds it: its gradient, itself, the optimiser's buffer M, and its machine precision."""

    gradient: Tensor
    weight: Tensor
    buffer: Tensor
    eps: float


def numbers(group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, float]:
    """All numbers of a parameter group and of the optimiser's state as they stand when the step begins.

    Those of a tuple are counted: ``betas`` gives ``betas1`` and ``betas2``. Before a parameter's first step most
    optimisers keep no state of it.
    """
    found: dict[str, float] = {}
    for name, value in (*group.items(), *state.items()):
        if name in _ASIDE or value is None:
            continue
        if isinstance(value, tuple | list):
            found |= {f"{name}{i}": float(v) for i, v in enumerate(value, start=1) if _is_number(v)}
        elif _is_number(value):
            found[name] = float(value)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


@dataclass(frozen=True)
class Rule:
    """What a step does to a parameter.

    ``transition`` gives its numbers, ``precondition`` the map P (None: there is none) and puts the new ``shared`` state
    in place of the old, without changing a tensor of it. ``buffer`` is where the optimiser keeps M, ``settings`` reads
    the numbers of a step.
    """

    name: str
    transition: Callable[[Settings], Transition]
    buffer: str | None = None
    shared: tuple[str, ...] = ()
    precondition: Callable[[Settings, Shared, Seen], Tensor] | None = None
    acts: Literal["entries", "left"] = "entries"
    """Whether P multiplies entry by entry, or is a matrix that multiplies from the left."""
    local: bool = True
    """Whether some entries of P can be found from those entries alone."""
    decays_by_factor: bool = False
    """Whether the optimiser multiplies W by ww itself, a number that is rounded to float32 where W is no finer."""
    settings: Callable[[Mapping[str, Any], Mapping[str, Any]], Settings] = numbers

    @property
    def state(self) -> tuple[str, ...]:
        """What the optimiser keeps of a parameter: the buffer and the shared state."""
        return (*([self.buffer] if self.buffer else []), *self.shared)
