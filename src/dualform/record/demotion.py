"""Moves parameters to the rest if the first use of their layer shows that it is not the linear map of its class.

Whether a layer with a forward pass of its own applies its weight unchanged, or whether a layer is called at all, is
known when the first gradients arrive. A parameter that has taken no step by then is kept as snapshots from its first
step on, with a mark that says why. A parameter that has taken steps already is only marked.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .plan import RecordingPlan
from .shards import ShardBuilder
from .training import BackwardHooks, ParameterUpdate
from .verify import GradientFollower, Marks

FUNCTIONAL = (
    "it has a gradient, but no recorded call of its layer made it (functional use of the weight, or the layer's "
    "forward called without its hooks?)"
)
KEPT = "it is kept as snapshots, unattributed"
MISSED = "the memory misses this part"


class Reason(NamedTuple):
    """Why a parameter is not explained: the kind of the mark, and a sentence."""

    mark: str
    text: str


class Demotion:
    """Finds parameters whose gradients no linear map made, step by step."""

    def __init__(self, backward_hooks: BackwardHooks, shard_builder: ShardBuilder, marks: Marks) -> None:
        self.backward_hooks, self.shard_builder, self.marks = backward_hooks, shard_builder, marks
        gradients = {name: follower.parameter.grad for name, follower in backward_hooks.followers.items()}
        self._left_over = {name for name, grad in gradients.items() if grad is not None and bool(grad.any())}
        self._new_marks: list[tuple[str, Reason, str]] = []

    def demote(self, updates: Sequence[ParameterUpdate]) -> set[GradientFollower]:
        """Move parameters to the rest before a step is taken; returns their followers."""
        reasons = self._reasons(updates)
        for name, reason in reasons.items():
            if reason.mark == "not-this-map" and not self._can_demote(name):
                self._new_marks.append((name, reason, MISSED))
        demoted = {name: reason for name, reason in reasons.items() if self._can_demote(name)}
        if not demoted:
            return set()
        plan = self.shard_builder.plan.demote({name: reason.text for name, reason in demoted.items()})
        names = [name for name in plan.demoted if name not in self.shard_builder.plan.demoted]
        for name, reason in demoted.items():
            if reason.mark != "not-this-map" or not self._follows(name, demoted):
                self._new_marks.append((name, reason, KEPT))
        self._change_plan(plan, names)
        return {self.backward_hooks.forget(name) for name in names}

    def mark(self, step: int) -> None:
        """Mark these parameters, after everything else is done: where warnings are errors, this raises one."""
        new_marks, self._new_marks = self._new_marks, []
        for name, reason, consequence in new_marks:
            self.marks(reason.mark, name, f"{reason.text}: {consequence}", step)

    def _reasons(self, updates: Sequence[ParameterUpdate]) -> dict[str, Reason]:
        unseen, self.backward_hooks.unseen = self.backward_hooks.unseen, {}
        texts = {update.follower.name: unseen.get(update.follower.name) for update in updates}
        reasons = {name: Reason("not-this-map", text) for name, text in texts.items() if text is not None}
        if any(update.passes for update in updates):  # else this step has no slots at all: gradients made by hand?
            without_slots = [update.follower.name for update in updates if update.bare]
            bare = [name for name in without_slots if name not in self._left_over]
            reasons = {name: Reason("without-slots", FUNCTIONAL) for name in bare} | reasons
        return reasons

    def _can_demote(self, name: str) -> bool:
        """Whether a parameter, and all that goes with it, has taken no step. Several processes would have to agree."""
        followers = self.backward_hooks.followers
        return self.backward_hooks.ranks.alone and not any(
            followers[member].moved for member in self.shard_builder.plan.goes_with(name)
        )

    def _follows(self, name: str, demoted: Mapping[str, Reason]) -> bool:
        """Whether a bias goes with a weight that is demoted, too: then one mark is enough for both."""
        return any(name != weight and name in self.shard_builder.plan.goes_with(weight) for weight in demoted)

    def _change_plan(self, plan: RecordingPlan, names: Sequence[str]) -> None:
        """From now on these parameters belong to the rest."""
        every = self.shard_builder.state.move_to_rest(plan, names)
        for name in names:
            self.shard_builder.certificate.forget(name)
            self.backward_hooks.ledger.accounts.pop(name, None)
        self.shard_builder.outside.forget(names)
        self.shard_builder.plan = self.backward_hooks.plan = plan
        self.shard_builder.pending.revised = {
            "layers": plan.layers,
            "parameters": plan.parameters,
            "demoted": plan.demoted,
            "snapshot_every": every,
        }
