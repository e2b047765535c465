"""From an optimiser's step to lines of the memory: what it does to each parameter, and the slots it uses up.

Optimisers that step one after the other, without a backward pass in between, take one step of the memory together (Muon
for the matrices, AdamW for all else).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim

from dualform.errors import NonFiniteGradient
from dualform.memory import all_finite
from dualform.rules import Rule
from dualform.types import Transition

from .book import Booked
from .eager import eager
from .gradients import Follower
from .marks import Marks
from .moved import Moved
from .notes import Notes
from .passes import Passes
from .plan import Plan
from .samples import Samples
from .shelf import Shelf
from .sizes import Sizes

LOOKED_AT = 1 << 12
"""Gradients of up to so many entries are searched for NaN at every step; of larger ones the watched entries."""


FINE = torch.finfo(torch.float64).eps
"""Parameters of this precision are multiplied by numbers as they are, all others by their float32."""


class Steps:
    """Watches the optimisers. A step counts when it is over."""

    def __init__(
        self, plan: Plan, passes: Passes, notes: Notes, samples: Samples, marks: Marks, shelf: Shelf, sizes: Sizes
    ) -> None:  # fmt: skip
        self.sizes = sizes
        self.plan, self.notes, self.book = plan, notes, passes.book
        self.samples, self.marks, self.shelf, self.outside = samples, marks, shelf, shelf.outside
        self._followers = {id(follower.parameter): follower for follower in passes.followers.values()}
        self._passes = passes
        self._together: list[optim.Optimizer] = []
        """The optimisers that took their part in the last step."""
        self._backwards = 0
        """The backward passes by then."""
        self._staged: list[Moved] | None = None
        self._booked: list[Booked] = []
        self._rule: tuple[Rule | None, bool] = None, False
        self._last: tuple[Transition | None, Mapping[str, float]] = None, {}

    def hook(self, optimizers: Sequence[optim.Optimizer]) -> list[Any]:
        """Put the hooks in place; returns their handles."""
        handles = []
        for optimizer, rule in zip(optimizers, self.plan.rules, strict=True):
            handles.append(optimizer.register_step_pre_hook(partial(self._begin, rule)))
            handles.append(optimizer.register_step_post_hook(partial(self._after, rule)))
        return handles

    def _whole(self) -> bool:
        """Whether no optimiser is likely to join in the last step. All processes must find the same."""
        if len(self._together) == len(self.plan.rules):
            return True
        return self._passes.ranks.alone and not self._passes.waiting

    def _begin(
        self, rule: Rule | None, optimizer: optim.Optimizer, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:  # fmt: skip
        return self._before(rule, torch.compiler.is_compiling(), optimizer, args, kwargs)

    @eager
    def _before(
        self, rule: Rule | None, compiled: bool, optimizer: optim.Optimizer, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:  # fmt: skip
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimiser
        if closure is None:
            self._stage(rule, compiled, optimizer)
            return None

        def closed() -> Any:  # the gradients of this step come with the closure
            loss = closure()
            self._stage(rule, compiled, optimizer)
            return loss

        return (optimizer, closed), {key: value for key, value in kwargs.items() if key != "closure"}

    @eager
    def _stage(self, rule: Rule | None, compiled: bool, optimizer: optim.Optimizer) -> None:
        """The gradients are as the step will use them: read them, and what the step is going to do."""
        self._staged, self._booked = None, []
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:
            return  # the loss scaler tells a fused optimiser to skip this step …
        scale = getattr(optimizer, "grad_scale", None)
        inner = 1.0 if scale is None else 1.0 / float(scale)  # … or to divide by the loss scale inside it
        staged, owner, mine = [], self.plan.owner, self.plan.rules.index(rule)
        self.outside.look_at_links(self.marks.step + 1)
        for group in optimizer.param_groups:
            options = {**group, "capturable": True} if compiled else group  # steps are tensors there, too
            for parameter in group["params"]:
                owner.setdefault(id(parameter), mine)
                follower = self._followers.get(id(parameter))
                if follower is None:
                    self.outside.look_at_parameter(parameter)
                    self.shelf.keep_first(parameter)
                    continue
                if parameter.grad is None:
                    follower.passes = []
                    continue
                bare = self._look_at(follower, parameter.grad)
                settings = rule.settings(options, optimizer.state.get(parameter, {})) if rule else {}
                rounds = bool(rule) and rule.decays_by_factor and follower.eps > FINE and not group.get("fused")
                if settings != self._last[1] or (rule, rounds) != self._rule:  # most steps are alike
                    transition = rule.transition(settings) if rule else None
                    if rounds and transition is not None:
                        transition = transition._replace(ww=float(np.float32(transition.ww)))
                    self._last, self._rule = (transition, settings), (rule, rounds)
                transition, settings = self._last
                self.outside.before_step(follower.name, rule, optimizer.state.get(parameter, {}))
                staged.append(Moved(follower, follower.passes, transition, settings, inner, bare))
                if follower.name in self.book.accounts:
                    assert transition is not None
                    state = optimizer.state.get(parameter, {})
                    self._booked.append(self.book.stage(follower, transition, settings, state, inner))
        self._look_at_slots(staged)
        self.samples.check([each.follower.name for each in staged], self.marks, self.marks.step + 1)
        self._staged = staged

    def _joins(self, optimizer: optim.Optimizer) -> bool:
        """Whether a step of an optimiser is a part of the last one."""
        others = self._together and all(each is not optimizer for each in self._together)
        return bool(others) and self._passes.backwards == self._backwards and self.shelf.holds(self.marks.step)

    def _look_at(self, follower: Follower, grad: Tensor) -> bool:
        """See that a gradient is finite, and whether it came from nowhere."""
        finite = follower.entries is None or follower.entries.seen.finite(follower.read(grad))
        if not finite or (grad.numel() <= LOOKED_AT and not all_finite(grad)):
            raise self._not_finite(f"the gradient of '{follower.name}' holds")
        return not follower.passes and bool(grad.any())

    def _look_at_slots(self, staged: Sequence[Moved]) -> None:
        batches = {}
        for each in staged:
            for added in each.passes:
                for slots in added.slots:
                    batches[id(slots.batch)] = slots.batch
                    if not slots.finite:
                        raise self._not_finite(f"the inputs or errors of layer '{slots.layer.name}' hold")
        for batch in batches.values():
            self.notes.check(batch)

    def _not_finite(self, what: str) -> NonFiniteGradient:
        step = self.marks.step
        return NonFiniteGradient(
            f"{what} NaN or infinity at step {step + 1}; the step was not taken. The memory stands at step "
            f"{self.shelf.stands_at()}. Lower the learning rate, clip the gradient, or look at the batch."
        )

    @eager
    def _after(self, rule: Rule | None, optimizer: optim.Optimizer, args: tuple, kwargs: dict) -> None:
        staged, self._staged = self._staged, None
        if staged is None:
            return
        if not self._joins(optimizer):
            self.marks.step += 1
            self._together, self._backwards = [], self._passes.backwards
        self._together.append(optimizer)
        self.book.take_step(self._booked)
        for each in staged:
            state = optimizer.state.get(each.follower.parameter, {})
            each.sample, each.state_sample = self.samples.take(each.follower.name, state, rule)
            self.outside.after_step(each.follower.name, rule, state)
            each.follower.passes = []
        self.sizes.take(self.marks.step, staged)
        self.shelf.add(self.marks.step, staged, whole=self._whole())
