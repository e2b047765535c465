"""Does the optimiser do what its rule says, to every entry? Now and then a step is computed beside the real one.

Under a rule that divides each entry by a number of its own, the certificate follows a few entries of a large weight. If
something changed others inside the step (a hook on the optimiser that clamps weights, say), only this would show it.
Weights under other rules are followed as a whole.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, optim

from dualform.engine import ParameterState, advance
from dualform.rules import Rule

from ..state import state_tensors
from ..verify import Marks
from .parameter_step import ParameterUpdate

EVERY = 64
"""After the first step, one parameter in so many steps."""

OTHERWISE = (
    "the optimiser's step changed it in another way than the rule says (a hook on the optimiser that changes weights, "
    "a step that somebody replaced?): the memory explains what the rule says"
)


class ExpectedStep(NamedTuple):
    """A parameter before a step, and what the rule makes of it."""

    name: str
    parameter: Tensor
    before: Tensor
    after: Tensor


class RuleAudit:
    """Computes steps beside the optimiser."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._expected: list[ExpectedStep] = []
        self._turn = 0

    def before(self, optimizer: optim.Optimizer, rule: Rule | None, staged: Sequence[ParameterUpdate]) -> None:
        """A step is about to be taken: compute it, if it is time to."""
        self._expected = []
        if rule is None or rule.precondition is None or not rule.local:
            return
        self._turn += 1
        if self._turn == 1:
            chosen = staged
        elif self._turn % EVERY == 0 and staged:
            chosen = [staged[self._turn // EVERY % len(staged)]]
        else:
            return
        self._expected = [self._expect(optimizer, rule, moved) for moved in chosen if moved.transition is not None]

    def after(self, step: int) -> None:
        """The step is over: mark what it did otherwise."""
        for name, parameter, before, after in self._expected:
            now, eps = parameter.detach(), torch.finfo(parameter.dtype).eps
            off, moved = float((now - after).norm()), float((now - before).norm())
            if not off <= 1e-3 * moved + 64 * eps * float(now.norm()):
                self.marks("stepped-otherwise", name, OTHERWISE, step)
        self._expected = []

    @staticmethod
    def _expect(optimizer: optim.Optimizer, rule: Rule, moved: ParameterUpdate) -> ExpectedStep:
        follower, transition = moved.follower, moved.transition
        parameter, grad = follower.parameter, follower.parameter.grad
        assert grad is not None and transition is not None
        kept = {key: t.detach() for key, t in state_tensors(rule, optimizer.state.get(parameter, {})).items()}
        buffer = kept.pop("buffer", torch.zeros_like(parameter))
        state, gradient = ParameterState(parameter.detach(), buffer, kept), grad.detach() * moved.inner
        after = advance(rule, transition, moved.settings, state, gradient, follower.eps).weight
        return ExpectedStep(follower.name, parameter, parameter.detach().clone(), after)
