"""Leaves parameters to the rest whose layer turns out, when it is first used, not to be the linear map of its class.

Whether a layer with a forward pass of its own applies its weight as it is, or whether anybody calls a layer at all, is
known when the first gradients come. A parameter that has not moved by then is kept as snapshots from its first step on,
with a mark that says why; of one that moved already only the mark tells.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .plan import RecordingPlan
from .shards import ShardBuilder
from .state import auto_interval
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

    def __init__(self, passes: BackwardHooks, shelf: ShardBuilder, marks: Marks) -> None:
        self.passes, self.shelf, self.marks = passes, shelf, marks
        gradients = {name: follower.parameter.grad for name, follower in passes.followers.items()}
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
        plan = self.shelf.plan.demote({name: reason.text for name, reason in demoted.items()})
        names = [name for name in plan.demoted if name not in self.shelf.plan.demoted]
        for name, reason in demoted.items():
            if reason.mark != "not-this-map" or not self._follows(name, demoted):
                self._news.append((name, reason, KEPT))
        self._change_plan(plan, names)
        return {self.passes.forget(name) for name in names}

    def tell(self, step: int) -> None:
        """Mark what was found, when all else is in order: a warning may be an error to the user."""
        news, self._news = self._news, []
        for name, reason, consequence in news:
            self.marks(reason.mark, name, f"{reason.text}: {consequence}", step)

    def _reasons(self, staged: Sequence[ParameterUpdate]) -> dict[str, Reason]:
        unseen, self.passes.unseen = self.passes.unseen, {}
        reasons = {each.follower.name: unseen.get(each.follower.name) for each in staged}
        found = {name: Reason("not-this-map", text) for name, text in reasons.items() if text is not None}
        if any(each.passes for each in staged):  # else nothing of this step was seen: gradients made by hand?
            bare = [each.follower.name for each in staged if each.bare and each.follower.name not in self._left_over]
            found = {name: Reason("without-slots", FUNCTIONAL) for name in bare} | found
        return found

    def _can_demote(self, name: str) -> bool:
        """Whether nothing that would go with a parameter has moved yet. Several processes would have to agree."""
        followers = self.passes.followers
        return self.passes.ranks.alone and not any(followers[each].moved for each in self.shelf.plan.goes_with(name))

    def _follows(self, name: str, others: Mapping[str, Reason]) -> bool:
        """Whether a bias goes with a weight that is left to the rest, too: then one mark tells of both."""
        return any(name != other and name in self.shelf.plan.goes_with(other) for other in others)

    def _change_plan(self, plan: RecordingPlan, names: Sequence[str]) -> None:
        """From now on these parameters are a part of the rest."""
        shelf, passes = self.shelf, self.passes
        every = shelf.rest.every
        if shelf.rest.automatic:  # a multiple, so that a look that is due by the new interval was due by the old one
            every *= math.ceil(auto_interval(plan.rest) / every)
        shelf.rest.add({name: plan.tensors[name] for name in names}, every)
        for name in names:
            shelf.proof.forget(name)
            passes.book.accounts.pop(name, None)
        shelf.stations.names = [name for name in shelf.stations.names if name not in names]
        shelf.outside.forget(names)
        shelf.plan = passes.plan = plan
        shelf.pending.revised = _revised(plan, every)


def _revised(plan: RecordingPlan, every: int) -> Mapping[str, object]:
    """The fields of the manifest that change with a plan."""
    return {
        "layers": plan.layers, "parameters": plan.parameters, "demoted": plan.demoted, "snapshot_every": every,
    }  # fmt: skip
