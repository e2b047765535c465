r"""One step of an optimiser that divides each entry of the gradient by a number of its own.

A preconditioned rule has a linear map P that all examples share. It is made anew at each step from the whole gradient
:math:`G_s = E_s^\top X_s` and the optimiser's other state; and with P known, the part that any group of slots has in
the weights follows the same recurrence as the weights themselves:

.. math:: \begin{bmatrix} W^g \\ M^g \end{bmatrix}_s = A_s \begin{bmatrix} W^g \\ M^g \end{bmatrix}_{s-1} + b_s\, g^g_s

with A and b made of numbers and P. The initial weights are one more group, without gradients. Wherever the whole state
was kept on disk, it is read from there, so that rounding errors do not add up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.rules import Rule, Seen, Settings
from dualform.types import Transition


@dataclass(frozen=True)
class ParameterState:
    """A parameter, its optimiser buffer M, and the optimiser state that all examples share."""

    weight: Float[Tensor, "..."]
    buffer: Float[Tensor, "..."]
    shared: Mapping[str, Tensor] = field(default_factory=dict)

    def patch(self, change: Callable[[Tensor], Tensor]) -> "ParameterState":
        """The state with a function applied to each of its tensors, for instance one that selects entries."""
        return ParameterState(
            change(self.weight), change(self.buffer), {name: change(tensor) for name, tensor in self.shared.items()}
        )

    def to(self, dtype: torch.dtype) -> "ParameterState":
        """The state in another precision."""
        return self.patch(lambda tensor: tensor.to(dtype))


def advance(
    rule: Rule, t: Transition, settings: Settings, state: ParameterState, gradient: Float[Tensor, "..."], eps: float
) -> ParameterState:  # fmt: skip
    """One step of the optimiser, given its transition, its settings and the gradient as the optimiser finds it."""
    p, shared = precondition(rule, settings, state, gradient, eps)
    weight, buffer = after_step(rule, t, p, state.weight, state.buffer, gradient)
    return ParameterState(weight, buffer, shared)


def precondition(
    rule: Rule, settings: Settings, state: ParameterState, gradient: Float[Tensor, "..."], eps: float
) -> tuple[Tensor | None, Mapping[str, Tensor]]:
    """The map P of a step (None if the rule has none), and the shared state after the step."""
    if rule.precondition is None:
        return None, state.shared
    shared = dict(state.shared)
    return rule.precondition(settings, shared, Seen(gradient, state.weight, state.buffer, eps)), shared


def after_step(
    rule: Rule, t: Transition, p: Tensor | None, weight: Tensor, buffer: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """W and M after a step, given P; for one part, or for several parts stacked along the first axis."""
    weight, buffer = weight.clone(), buffer.clone()
    apply_step(rule, t, p, weight, buffer, gradient)
    return weight, buffer


def apply_step(rule: Rule, t: Transition, p: Tensor | None, weight: Tensor, buffer: Tensor, gradient: Tensor) -> None:
    """Change W and M in place: with many parts, new tensors would cost more than the sums."""
    preconditioned = None
    if p is not None and (t.wp or t.mp):
        inside = t.pg * gradient
        _add(inside, (t.pm, buffer), (t.pw, weight))
        preconditioned = inside.mul_(p) if rule.acts == "entries" else p @ inside
    before = weight.clone() if t.mw else None
    _add(_times(weight, t.ww), (t.wm, buffer), (t.wg, gradient), (t.wp, preconditioned))
    _add(_times(buffer, t.mm), (t.mw, before), (t.mg, gradient), (t.mp, preconditioned))


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else tensor.mul_(factor)


def _add(total: Tensor, *terms: tuple[float, Tensor | None]) -> None:
    for factor, term in terms:
        if factor and term is not None:
            total.add_(term, alpha=factor)
