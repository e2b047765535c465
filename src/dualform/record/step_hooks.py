"""Hooks on the optimisers: what a step does to each parameter, and which slots it uses up."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import optim

from dualform.errors import NonFiniteGradient
from dualform.rules import Rule
from dualform.store import entry_sample, sampled_entries
from dualform.types import Transition

from .demotion import Demotion
from .optimizer_hooks import OptimizerHooks
from .plan import RecordingPlan
from .run_log import RunKeeper, RunPass
from .shards import ShardBuilder, SizeReport
from .slots import Batch, ModelCall
from .state import state_tensors
from .training import BackwardHooks, Clock, LedgerStep, ParameterUpdate, RuleAudit, WarmUpReport
from .verify import Marks, probe_gradients

FINE = torch.finfo(torch.float64).eps
"""Parameters of this precision are multiplied by float64 factors, all others by the same in float32."""


class StepHooks(OptimizerHooks):
    """Finds out what the steps of the optimisers do to the recorded parameters."""

    def __init__(
        self,
        plan: RecordingPlan,
        clock: Clock,
        marks: Marks,
        backward_hooks: BackwardHooks,
        shard_builder: ShardBuilder,
        sizes: SizeReport,
        run_keeper: RunKeeper | None = None,
    ) -> None:
        super().__init__(plan, clock, backward_hooks.interrupts, shard_builder)
        self.run_keeper, self.marks, self.sizes = run_keeper, marks, sizes
        self.backward_hooks, self.outside = backward_hooks, shard_builder.outside
        self.notes, self.ledger = backward_hooks.notes, backward_hooks.ledger
        first = backward_hooks.ranks.first
        explained = {name: plan.tensors[name] for name in plan.explained if first}
        self._sampled = {name: (tensor, sampled_entries(tensor)) for name, tensor in explained.items()}
        """A few entries of each weight: by these the memory knows which model it belongs to."""
        self._followers = {id(follower.parameter): follower for follower in backward_hooks.followers.values()}
        self._passes: list[RunPass] = []
        """The passes of the step under way, as recorded layers have seen them."""
        self._demotion = Demotion(backward_hooks, shard_builder, marks)
        self._rule_audit, self._warm_up = RuleAudit(marks), WarmUpReport(sizes.say)
        self._updates: list[ParameterUpdate] | None = None
        self._ledger_steps: list[LedgerStep] = []
        self._last_rule: tuple[Rule | None, bool] = None, False
        self._last_transition: tuple[Transition | None, Mapping[str, float]] = None, {}

    def _stage(self, rule: Rule | None, compiled: bool, optimizer: optim.Optimizer) -> None:
        """The gradients are final: read them, and what the step is going to do with them."""
        self._updates, self._ledger_steps = None, []
        self.interrupts.watch()
        self.outside.mark_is_known(self.outside.unfinished_step.mark(self.marks, self.clock.next_step))
        self.backward_hooks.forget_unfinished()
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:
            return  # the loss scaler tells a fused optimiser to skip this step …
        scale = getattr(optimizer, "grad_scale", None)
        inner = 1.0 if scale is None else 1.0 / float(scale)  # … or to divide by the loss scale inside it
        updates: list[ParameterUpdate] = []
        owners, number = self.plan.owners, self.plan.rules.index(rule)
        self.outside.check_links(self.clock.next_step)
        for group in optimizer.param_groups:
            options = {**group, "capturable": True} if compiled else group  # steps are tensors there, too
            for parameter in group["params"]:
                owners.add(parameter, number)
                follower = self._followers.get(id(parameter))
                if follower is None:
                    self.outside.check_parameter(parameter)
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
                if settings != self._last_transition[1] or (rule, rounds) != self._last_rule:  # most steps are alike
                    transition = rule.transition(settings) if rule else None
                    if rounds and transition is not None:
                        transition = transition._replace(ww=float(np.float32(transition.ww)))
                    self._last_transition, self._last_rule = (transition, settings), (rule, rounds)
                transition, settings = self._last_transition
                self.outside.before_step(follower.name, state_tensors(rule, state))
                updates.append(ParameterUpdate(follower, follower.passes, transition, settings, inner, bare))
                if follower.name in self.ledger.accounts:
                    assert transition is not None
                    self._ledger_steps.append(self.ledger.stage(follower, transition, settings, state, inner))
        self._probe_gradients(updates)
        if self.backward_hooks.unseen or any(update.bare for update in updates):
            updates = self._without_demoted(updates)
        self._check_slots(updates)
        if self.run_keeper is not None:
            self._passes = passes_of(updates)
            self.run_keeper.before_step(self.clock.next_step, optimizer, self._passes)
        self._rule_audit.before(optimizer, rule, updates)
        self.outside.unfinished_step.begin(optimizer)
        self._updates, self.interrupts.stepping = updates, optimizer

    def _without_demoted(self, updates: list[ParameterUpdate]) -> list[ParameterUpdate]:
        """The updates of a step without those of parameters that have to be moved to the rest now."""
        demoted = self._demotion.demote(updates)
        for follower in demoted:
            self._followers.pop(id(follower.parameter), None)
        names = {follower.name for follower in demoted}
        self._ledger_steps = [step for step in self._ledger_steps if step.account.name not in names]
        self._demotion.mark(self.clock.next_step)
        return [update for update in updates if update.follower not in demoted]

    def _probe_gradients(self, updates: Sequence[ParameterUpdate]) -> None:
        """Take the probes of all gradients, which show NaN and infinity, too."""
        gradients = {
            update.follower: grad for update in updates if (grad := update.follower.parameter.grad) is not None
        }
        if not gradients:
            return
        probes, finite = probe_gradients([follower.probe for follower in gradients], list(gradients.values()))
        for update, probe in zip(updates, probes, strict=True):
            update.probe = probe
        for follower, grad in () if finite else gradients.items():
            if not bool(grad.isfinite().all()):
                raise self._not_finite(f"the gradient of '{follower.name}' holds")

    def _check_slots(self, updates: Sequence[ParameterUpdate]) -> None:
        """Raise an error if slots are not finite, or if their batch was not noted with the usual columns."""
        batches = {}
        for update in updates:
            for gradient_pass in update.passes:
                for slots in gradient_pass.slots:
                    batches[id(slots.batch)] = slots.batch
                    if not slots.finite:
                        raise self._not_finite(f"the inputs or errors of layer '{slots.layer.name}' hold")
        for batch in batches.values():
            self.notes.check(batch)

    def _not_finite(self, subject: str) -> NonFiniteGradient:
        step = self.clock.step
        return NonFiniteGradient(
            f"{subject} NaN or infinity at step {step + 1}; the step was not taken. The memory stands at step "
            f"{self.shard_builder.stands_at()}. Lower the learning rate, clip the gradient, or look at the batch."
        )

    def _after(self, rule: Rule | None, optimizer: optim.Optimizer, args: tuple, kwargs: dict) -> None:
        updates, self._updates = self._updates, None
        self.interrupts.stepping = None
        if updates is None:
            return
        for update in updates:
            state = state_tensors(rule, optimizer.state.get(update.follower.parameter, {}))
            if update.follower.name in self._sampled:
                tensor, entries = self._sampled[update.follower.name]
                update.sample, update.state_sample = entries.of(tensor), entry_sample(state.values())
            self.outside.after_step(update.follower.name, state)
        self.clock.stepped(optimizer, self.backward_hooks.backwards, self.shard_builder.holds(self.clock.step))
        if self.run_keeper is not None:
            self.run_keeper.after_step(self.clock.step, optimizer, self._passes, self.shard_builder.pending)
            self.sizes.announce(self.clock.step, self.run_keeper.announcement)
        self._rule_audit.after(self.clock.step)
        self.shard_builder.enter(self.clock.step, updates)
        if self._ledger_steps:
            with self.shard_builder.refused_after_errors("the ledger"):
                self.ledger.take_step(self._ledger_steps)
        for update in updates:
            update.follower.passes, update.follower.moved = [], True
        self.outside.unfinished_step.end()
        self.sizes.take(self.clock.step, updates)
        self._warm_up.take(rule, updates)
        # no other optimiser is likely to join in this step; all processes must find the same
        all_joined = self._all_stepped or (self.backward_hooks.ranks.alone and not self.backward_hooks.waiting)
        self.shard_builder.add(self.clock.step, updates, all_joined)


def passes_of(updates: Sequence[ParameterUpdate]) -> list[RunPass]:
    """The passes whose slots a step uses, each with the calls of the model that they come from."""
    batches: dict[int, Batch] = {}
    calls: dict[int, dict[int, ModelCall]] = {}
    for update in updates:
        for gradient_pass in update.passes:
            for slots in gradient_pass.slots:
                batches[id(slots.batch)] = slots.batch
                if slots.entry is not None:
                    calls.setdefault(id(slots.batch), {})[slots.entry.number] = slots.entry
    return [RunPass(batch, [call for _, call in sorted(calls.get(key, {}).items())]) for key, batch in batches.items()]
