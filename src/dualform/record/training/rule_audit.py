"""Checks that the optimiser does what its rule says to every entry: some steps are computed beside the real ones.

Under a rule that divides each entry by a number of its own, the certificate follows a few entries of a large weight. If
something changes other entries inside the step (a hook on the optimiser that clamps weights, say), only this audit
shows it. Weights under other rules are followed as a whole.
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
"""After the first step, one parameter is checked every so many steps."""

OTHERWISE = (
    "the optimiser's step changed it in another way than the rule says (a hook on the optimiser that changes weights, "
    "a step that somebody replaced?): the memory explains what the rule says"
)


class ExpectedStep(NamedTuple):
    """A parameter before a step, and after it according to the rule."""

    name: str
    parameter: Tensor
    before: Tensor
    after: Tensor


class RuleAudit:
    """Computes some steps by the rule and compares them with the optimiser's."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._expected: list[ExpectedStep] = []
        self._turn = 0

    def before(self, optimizer: optim.Optimizer, rule: Rule | None, updates: Sequence[ParameterUpdate]) -> None:
        """A step is about to be taken: compute it, if this one is to be checked."""
        self._expected = []
        if rule is None or rule.precondition is None or not rule.local:
            return
        self._turn += 1
        if self._turn == 1:
            chosen = updates
        elif self._turn % EVERY == 0 and updates:
            chosen = [updates[self._turn // EVERY % len(updates)]]
        else:
            return
        self._expected = [self._expect(optimizer, rule, update) for update in chosen if update.transition is not None]

    def after(self, step: int) -> None:
        """The step is over: mark parameters that differ from the expected ones."""
        for name, parameter, before, after in self._expected:
            now, eps = parameter.detach(), torch.finfo(parameter.dtype).eps
            off, distance = float((now - after).norm()), float((now - before).norm())
            if not off <= 1e-3 * distance + 64 * eps * float(now.norm()):
                self.marks("stepped-otherwise", name, OTHERWISE, step)
        self._expected = []

    @staticmethod
    def _expect(optimizer: optim.Optimizer, rule: Rule, update: ParameterUpdate) -> ExpectedStep:
        follower, transition = update.follower, update.transition
        parameter, grad = follower.parameter, follower.parameter.grad
        assert grad is not None and transition is not None
        shared = {key: t.detach() for key, t in state_tensors(rule, optimizer.state.get(parameter, {})).items()}
        buffer = shared.pop("buffer", torch.zeros_like(parameter))
        state, gradient = ParameterState(parameter.detach(), buffer, shared), grad.detach() * update.inner
        after = advance(rule, transition, update.settings, state, gradient, follower.eps).weight
        return ExpectedStep(follower.name, parameter, parameter.detach().clone(), after)
