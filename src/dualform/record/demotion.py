"""Leaves parameters to the rest whose layer turns out, when it is first used, not to be the linear map of its class.

Whether a layer with a forward pass of its own applies its weight as it is, or whether anybody calls a layer at all, is
known when the first gradients come. A parameter that has not moved by then is kept as snapshots from its first step on,
with a mark that says why; of one that moved already only the mark tells.
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
    """Looks at the gradients that no linear map made, step by step."""

    def __init__(self, backward_hooks: BackwardHooks, shard_builder: ShardBuilder, marks: Marks) -> None:
        self.backward_hooks, self.shard_builder, self.marks = backward_hooks, shard_builder, marks
        gradients = {name: follower.parameter.grad for name, follower in backward_hooks.followers.items()}
        self._left_over = {name for name, grad in gradients.items() if grad is not None and bool(grad.any())}
        self._news: list[tuple[str, Reason, str]] = []

    def look(self, staged: Sequence[ParameterUpdate]) -> set[GradientFollower]:
        """Leave to the rest what has to be before a step is taken; returns who followed it."""
        reasons = self._reasons(staged)
        for name, reason in reasons.items():
            if reason.mark == "not-this-map" and not self._can_demote(name):
                self._news.append((name, reason, MISSED))
        demoted = {name: reason for name, reason in reasons.items() if self._can_demote(name)}
        if not demoted:
            return set()
        plan = self.shard_builder.plan.demote({name: reason.text for name, reason in demoted.items()})
        names = [name for name in plan.demoted if name not in self.shard_builder.plan.demoted]
        for name, reason in demoted.items():
            if reason.mark != "not-this-map" or not self._follows(name, demoted):
                self._news.append((name, reason, KEPT))
        self._change_plan(plan, names)
        return {self.backward_hooks.forget(name) for name in names}

    def tell(self, step: int) -> None:
        """Mark what was found, when all else is in order: a warning may be an error to the user."""
        news, self._news = self._news, []
        for name, reason, consequence in news:
            self.marks(reason.mark, name, f"{reason.text}: {consequence}", step)

    def _reasons(self, staged: Sequence[ParameterUpdate]) -> dict[str, Reason]:
        unseen, self.backward_hooks.unseen = self.backward_hooks.unseen, {}
        reasons = {each.follower.name: unseen.get(each.follower.name) for each in staged}
        found = {name: Reason("not-this-map", text) for name, text in reasons.items() if text is not None}
        if any(each.passes for each in staged):  # else nothing of this step was seen: gradients made by hand?
            bare = [each.follower.name for each in staged if each.bare and each.follower.name not in self._left_over]
            found = {name: Reason("without-slots", FUNCTIONAL) for name in bare} | found
        return found

    def _can_demote(self, name: str) -> bool:
        """Whether nothing that would go with a parameter has moved yet. Several processes would have to agree."""
        followers = self.backward_hooks.followers
        return self.backward_hooks.ranks.alone and not any(
            followers[each].moved for each in self.shard_builder.plan.goes_with(name)
        )

    def _follows(self, name: str, others: Mapping[str, Reason]) -> bool:
        """Whether a bias goes with a weight that is left to the rest, too: then one mark tells of both."""
        return any(name != other and name in self.shard_builder.plan.goes_with(other) for other in others)

    def _change_plan(self, plan: RecordingPlan, names: Sequence[str]) -> None:
        """From now on these parameters are a part of the rest."""
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
