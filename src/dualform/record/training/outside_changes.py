"""What happens to the network outside of the recorded steps, and so is no part of the memory: each is marked.

Modules and parameters that are replaced, optimiser state that is cleared or loaded, an optimiser object that nobody
passed to ``record``, and weights that are loaded after the last step.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from dualform.engine import Agreement
from dualform.rules import path_of

from ..hooks import uncompiled
from ..plan import ModelLinks, RecordingPlan, unwrapped
from ..state import states_of
from ..verify import Marks, UnfinishedStep, WeightFingerprints
from .backward_hooks import BackwardHooks
from .clock import Clock
from .live_ledger import states_by_name

REPLACED = (
    "another module or parameter took its place in the model: the memory holds how the old one was trained, and from "
    "this step on not the whole network. Begin a new recording after such a change"
)
ADDED = (
    "it joined the model after recording began, so the memory holds nothing of it. Begin a new recording after such a "
    "change"
)
EDITED = (
    "it was changed outside the optimiser's step (an edit, a clamp, a loaded checkpoint?): the memory does not hold "
    "that change"
)
STATE = (
    "the optimiser's state of it was changed outside the optimiser's step (cleared, or loaded from a checkpoint?): the "
    "memory does not hold that change, and the certificate shows what it misses (nothing where SGD's momentum was "
    "cleared)"
)
AT_END = (
    "its weights were changed after the last recorded step (best or averaged weights loaded inside the with-block?): "
    "they are no part of the memory, which stands at the weights of its last step"
)


class OutsideChanges:
    """Compares the network with what its last recorded step left."""

    def __init__(
        self,
        plan: RecordingPlan,
        optimizers: Sequence[optim.Optimizer],
        clock: Clock,
        backward_hooks: BackwardHooks,
        marks: Marks,
    ) -> None:
        self.plan, self.optimizers, self.clock, self.marks = plan, optimizers, clock, marks
        self.backward_hooks = backward_hooks
        self.unfinished_step = UnfinishedStep(plan.tensors)
        self.links = ModelLinks(plan.model, plan.tensors)
        self.replaced: set[str] = set()
        """The parameters that others took the place of."""
        names = (*plan.explained, *plan.in_ledger) if backward_hooks.ranks.first else ()
        states = states_of(plan, optimizers) | states_by_name(plan, optimizers)
        self.fingerprints = WeightFingerprints({name: plan.tensors[name] for name in names}, states)
        self._names = {id(plan.tensors[name]): name for name in names}
        self._known = {id(tensor) for tensor in plan.tensors.values()}
        self._backwards = 0
        self._told: set[str] = set()
        """The parameters that a mark tells of already, since their last step."""

    def hook(self) -> list[Any]:
        """Hear of the steps of all optimisers, as long as recording goes on; returns the handles."""
        return [register_optimizer_step_post_hook(self._after_any)]

    def tell(self, names: Iterable[str]) -> None:
        """Why these parameters have changed since their last step is marked already."""
        self._told.update(names)

    def before_step(self, name: str, state: Mapping[str, Tensor]) -> None:
        """A parameter is about to take a recorded step: are it and the optimiser's state what the last one left?"""
        if name not in self._told and self.fingerprints.changed(name):
            self.marks("edited", name, EDITED, self.clock.next_step)
        if self.fingerprints.state_changed(name, state):
            self.marks("state-changed", name, STATE, self.clock.next_step)

    def after_step(self, name: str, state: Mapping[str, Tensor]) -> None:
        """A parameter took a recorded step."""
        self._backwards = self.backward_hooks.backwards
        self._told.discard(name)
        self.fingerprints.take(name, state)

    def forget(self, names: Sequence[str]) -> None:
        """Some parameters are kept as snapshots from now on: whatever they become is in the memory."""
        for name in names:
            whole = self.fingerprints.tensors.pop(name, None)
            self._names.pop(id(whole and whole.tensor), None)

    def look_at_links(self, step: int) -> None:
        """See that the model still holds the modules and parameters that are recorded."""
        if not self.links.same():
            for name in self.links.replaced():
                if name not in self.replaced:
                    self.replaced.add(name)
                    self.marks("replaced", name, REPLACED, step)

    def look_at_parameter(self, parameter: Tensor) -> None:
        """A recorded optimiser steps on a parameter that belongs to no recorded layer: does the memory know it?"""
        if id(parameter) not in self._known:
            self._known.add(id(parameter))
            name = self.links.name_of(parameter)
            if name is not None and name not in self.replaced:
                self.marks("added", name, ADDED, self.clock.next_step)

    def foreign(self) -> set[str]:
        """The explained parameters whose weights are not those that their last recorded step left."""
        return self.replaced | {name for name in self.fingerprints.tensors if self.fingerprints.changed(name)}

    def close(self, unfinished: Iterable[str] = ()) -> set[str]:
        """Recording ends: mark the parameters that have other weights than the last step left, and return them. Those
        of a step that was broken off are marked already.
        """
        self.look_at_links(self.clock.step)
        for name in self.links.added():
            self.marks("added", name, ADDED, self.clock.step)
        foreign, others = self.foreign(), {mark.name for mark in self.marks.all() if mark.kind == "other-optimiser"}
        passes = self.backward_hooks.backwards - self._backwards
        unused = f"; {passes} backward passes since then were used by no recorded optimiser" if passes else ""
        for name in sorted(foreign - self.replaced - others - set(unfinished)):
            self.marks("changed-at-end", name, AT_END + unused, self.clock.step)
        return foreign

    def certificate(self, certified: Mapping[str, Agreement], foreign: Container[str]) -> dict[str, Agreement]:
        """Without the lines that compare with foreign weights; what was replaced is not explained at all."""
        own = {name: line for name, line in certified.items() if name not in foreign}
        return own | {name: Agreement(math.inf, 0.0) for name in certified if name in self.replaced}

    @uncompiled
    def _after_any(self, optimizer: optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Some optimiser took a step. One that only passes on what a recorded one did leaves the weights alone."""
        if any(unwrapped(optimizer) is own for own in self.optimizers):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is not None and self.fingerprints.changed(name):
                    message = (
                        f"another optimiser object ({path_of(type(optimizer))}) stepped on it: the memory misses these "
                        "steps. Pass all optimisers to record, record(model, [first, second], path)"
                    )
                    self.marks("other-optimiser", name, message, self.clock.next_step)
                    self.tell([name])
