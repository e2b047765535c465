"""From an optimiser's step to lines of the memory: what it does to each parameter, and the slots it uses up.

Optimisers that step one after the other, without a backward pass in between, take one step of the memory together (Muon
for the matrices, AdamW for all else).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import optim

from dualform.errors import NonFiniteGradient
from dualform.rules import Rule
from dualform.store import entry_sample, sampled_entries
from dualform.types import Transition

from .demotion import Demotion
from .hooks import uncompiled
from .plan import RecordingPlan
from .shards import ShardBuilder, SizeReport
from .state import state_tensors
from .training import BackwardHooks, Clock, LedgerStep, ParameterUpdate, RuleAudit
from .verify import Marks, probe_gradients

FINE = torch.finfo(torch.float64).eps
"""Parameters of this precision are multiplied by numbers as they are, all others by their float32."""


class StepHooks:
    """Watches the optimisers. A step counts when it is over."""

    def __init__(
        self,
        plan: RecordingPlan,
        clock: Clock,
        marks: Marks,
        backward_hooks: BackwardHooks,
        shard_builder: ShardBuilder,
        sizes: SizeReport,
    ) -> None:
        self.plan, self.clock, self.marks, self.sizes = plan, clock, marks, sizes
        self.backward_hooks, self.shard_builder = backward_hooks, shard_builder
        self.notes, self.ledger = backward_hooks.notes, backward_hooks.ledger
        self.interrupts, self.outside = backward_hooks.interrupts, shard_builder.outside
        first = backward_hooks.ranks.first
        explained = {name: plan.tensors[name] for name in plan.explained if first}
        self._sampled = {name: (tensor, sampled_entries(tensor)) for name, tensor in explained.items()}
        """A few entries of each weight: by these the memory knows which model it belongs to."""
        self._followers = {id(follower.parameter): follower for follower in backward_hooks.followers.values()}
        self._together: list[optim.Optimizer] = []
        """The optimisers that took their part in the last step."""
        self._backwards = 0
        """The backward passes by then."""
        self._demotion = Demotion(backward_hooks, shard_builder, marks)
        self._rule_audit = RuleAudit(marks)
        self._staged: list[ParameterUpdate] | None = None
        self._booked: list[LedgerStep] = []
        self._rule: tuple[Rule | None, bool] = None, False
        self._last: tuple[Transition | None, Mapping[str, float]] = None, {}

    def hook(self, optimizers: Sequence[optim.Optimizer]) -> list[Any]:
        """Put the hooks in place; returns their handles. A copy or a pickle of an optimiser has no hooks."""
        handles = []
        for optimizer, rule in zip(optimizers, self.plan.rules, strict=True):
            before = uncompiled(self.interrupts.around(partial(self._before, rule)))
            after = uncompiled(self.interrupts.around(partial(self._after, rule)))
            handles.append(optimizer.register_step_pre_hook(partial(self._begin, before)))
            handles.append(optimizer.register_step_post_hook(after))
        return handles

    @staticmethod
    def _begin(
        before: Callable[..., tuple[tuple, dict] | None], optimizer: optim.Optimizer, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """A step begins. Only here, before a compiled graph breaks, it is seen whether there is one."""
        return before(torch.compiler.is_compiling(), optimizer, args, kwargs)

    def _before(
        self, rule: Rule | None, compiled: bool, optimizer: optim.Optimizer, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:  # fmt: skip
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimiser
        if closure is None:
            self._stage(rule, compiled, optimizer)
            return None

        def closed() -> Any:  # the gradients of this step come with the closure
            loss = closure()
            self.interrupts.around(self._stage)(rule, compiled, optimizer)
            return loss

        return (optimizer, closed), {key: value for key, value in kwargs.items() if key != "closure"}

    def _stage(self, rule: Rule | None, compiled: bool, optimizer: optim.Optimizer) -> None:
        """The gradients are as the step will use them: read them, and what the step is going to do."""
        self._staged, self._booked = None, []
        self.interrupts.watch()
        self.outside.tell(self.outside.unfinished_step.mark(self.marks, self.clock.next_step))
        self.backward_hooks.forget_unfinished()
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:
            return  # the loss scaler tells a fused optimiser to skip this step …
        scale = getattr(optimizer, "grad_scale", None)
        inner = 1.0 if scale is None else 1.0 / float(scale)  # … or to divide by the loss scale inside it
        staged: list[ParameterUpdate] = []
        owner, mine = self.plan.owner, self.plan.rules.index(rule)
        self.outside.look_at_links(self.clock.next_step)
        for group in optimizer.param_groups:
            options = {**group, "capturable": True} if compiled else group  # steps are tensors there, too
            for parameter in group["params"]:
                owner.setdefault(id(parameter), mine)
                follower = self._followers.get(id(parameter))
                if follower is None:
                    self.outside.look_at_parameter(parameter)
                    self.shard_builder.keep_first(parameter)
                    continue
                if parameter.grad is None:
                    follower.passes = []
                    continue
                if follower.watched is not None:
                    follower.read(parameter.grad)
                bare = not follower.passes and bool(parameter.grad.any())
                state = optimizer.state.get(parameter, {})
                settings = rule.settings(options, state) if rule else {}
                rounds = bool(rule) and rule.decays_by_factor and follower.eps > FINE and not group.get("fused")
                if settings != self._last[1] or (rule, rounds) != self._rule:  # most steps are alike
                    transition = rule.transition(settings) if rule else None
                    if rounds and transition is not None:
                        transition = transition._replace(ww=float(np.float32(transition.ww)))
                    self._last, self._rule = (transition, settings), (rule, rounds)
                transition, settings = self._last
                self.outside.before_step(follower.name, state_tensors(rule, state))
                staged.append(ParameterUpdate(follower, follower.passes, transition, settings, inner, bare))
                if follower.name in self.ledger.accounts:
                    assert transition is not None
                    self._booked.append(self.ledger.stage(follower, transition, settings, state, inner))
        self._look_at_gradients(staged)
        if self.backward_hooks.unseen or any(each.bare for each in staged):
            staged = self._without_demoted(staged)
        self._look_at_slots(staged)
        self._rule_audit.before(optimizer, rule, staged)
        self.outside.unfinished_step.begin(optimizer)
        self._staged, self.interrupts.stepping = staged, optimizer

    def _without_demoted(self, staged: list[ParameterUpdate]) -> list[ParameterUpdate]:
        """The parameters of a step without those that are left to the rest now."""
        demoted = self._demotion.look(staged)
        for follower in demoted:
            self._followers.pop(id(follower.parameter), None)
        names = {follower.name for follower in demoted}
        self._booked = [each for each in self._booked if each.account.name not in names]
        self._demotion.tell(self.clock.next_step)
        return [each for each in staged if each.follower not in demoted]

    def _joins(self, optimizer: optim.Optimizer) -> bool:
        """Whether a step of an optimiser is a part of the last one."""
        others = self._together and all(each is not optimizer for each in self._together)
        return (
            bool(others)
            and self.backward_hooks.backwards == self._backwards
            and self.shard_builder.holds(self.clock.step)
        )

    def _look_at_gradients(self, staged: Sequence[ParameterUpdate]) -> None:
        """See gradients whole, through their probes: NaN or infinity show there, too."""
        gradients = {each.follower: grad for each in staged if (grad := each.follower.parameter.grad) is not None}
        if not gradients:
            return
        probes, finite = probe_gradients([follower.probe for follower in gradients], list(gradients.values()))
        for each, probe in zip(staged, probes, strict=True):
            each.probe = probe
        for follower, grad in () if finite else gradients.items():
            if not bool(grad.isfinite().all()):
                raise self._not_finite(f"the gradient of '{follower.name}' holds")

    def _look_at_slots(self, staged: Sequence[ParameterUpdate]) -> None:
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
        step = self.clock.step
        return NonFiniteGradient(
            f"{what} NaN or infinity at step {step + 1}; the step was not taken. The memory stands at step "
            f"{self.shard_builder.stands_at()}. Lower the learning rate, clip the gradient, or look at the batch."
        )

    def _after(self, rule: Rule | None, optimizer: optim.Optimizer, args: tuple, kwargs: dict) -> None:
        staged, self._staged = self._staged, None
        self.interrupts.stepping = None
        if staged is None:
            return
        for each in staged:
            state = state_tensors(rule, optimizer.state.get(each.follower.parameter, {}))
            if each.follower.name in self._sampled:
                tensor, entries = self._sampled[each.follower.name]
                each.sample, each.state_sample = entries.of(tensor), entry_sample(state.values())
            self.outside.after_step(each.follower.name, state)
        if not self._joins(optimizer):
            self.clock.tick()
            self._together, self._backwards = [], self.backward_hooks.backwards
        self._together.append(optimizer)
        self._rule_audit.after(self.clock.step)
        self.shard_builder.enter(self.clock.step, staged)
        if self._booked:
            with self.shard_builder.refused_after_errors("the ledger"):
                self.ledger.take_step(self._booked)
        for each in staged:
            each.follower.passes, each.follower.moved = [], True
        self.outside.unfinished_step.end()
        self.sizes.take(self.clock.step, staged)
        # no other optimiser is likely to join in this step; all processes must find the same
        all_joined = len(self._together) == len(self.plan.rules)
        whole = all_joined or (self.backward_hooks.ranks.alone and not self.backward_hooks.waiting)
        self.shard_builder.add(self.clock.step, staged, whole)
