"""Marks changes of the network outside of the recorded steps, which the memory does not contain.

They are modules and parameters that are replaced, optimiser state that is cleared or loaded, steps of an optimiser
object that was not passed to ``record``, and weights that are loaded after the last step.
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
    """Compares the network with its state after the last recorded step."""

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
        """The parameters that were replaced by others."""
        names = (*plan.explained, *plan.in_ledger) if backward_hooks.ranks.first else ()
        states = states_of(plan, optimizers) | states_by_name(plan, optimizers)
        self.fingerprints = WeightFingerprints({name: plan.tensors[name] for name in names}, states)
        self._names = {id(plan.tensors[name]): name for name in names}
        self._known_ids = {id(tensor) for tensor in plan.tensors.values()}
        self._backwards = 0
        self._marked: set[str] = set()
        """The parameters whose change since their last step is marked already."""

    def hook(self) -> list[Any]:
        """Watch the steps of all optimisers while recording goes on; returns the handles."""
        return [register_optimizer_step_post_hook(self._after_any)]

    def mark_is_known(self, names: Iterable[str]) -> None:
        """The change of these parameters since their last step is marked already."""
        self._marked.update(names)

    def before_step(self, name: str, state: Mapping[str, Tensor]) -> None:
        """A parameter is about to take a recorded step: mark changes of it and of its state since the last one."""
        if name not in self._marked and self.fingerprints.changed(name):
            self.marks("edited", name, EDITED, self.clock.next_step)
        if self.fingerprints.state_changed(name, state):
            self.marks("state-changed", name, STATE, self.clock.next_step)

    def after_step(self, name: str, state: Mapping[str, Tensor]) -> None:
        """A parameter has taken a recorded step."""
        self._backwards = self.backward_hooks.backwards
        self._marked.discard(name)
        self.fingerprints.take(name, state)

    def forget(self, names: Sequence[str]) -> None:
        """Some parameters are kept as snapshots from now on, so that no change of them is lost."""
        for name in names:
            stretch = self.fingerprints.tensors.pop(name, None)
            self._names.pop(id(stretch and stretch.tensor), None)

    def check_links(self, step: int) -> None:
        """Mark recorded parameters that the model no longer holds."""
        if not self.links.same():
            for name in self.links.replaced():
                if name not in self.replaced:
                    self.replaced.add(name)
                    self.marks("replaced", name, REPLACED, step)

    def check_parameter(self, parameter: Tensor) -> None:
        """A recorded optimiser steps on a parameter of no recorded layer: mark it if it joined the model later."""
        if id(parameter) not in self._known_ids:
            self._known_ids.add(id(parameter))
            name = self.links.name_of(parameter)
            if name is not None and name not in self.replaced:
                self.marks("added", name, ADDED, self.clock.next_step)

    def foreign(self) -> set[str]:
        """The explained parameters that differ from what their last recorded step left."""
        return self.replaced | {name for name in self.fingerprints.tensors if self.fingerprints.changed(name)}

    def close(self, unfinished: Iterable[str] = ()) -> set[str]:
        """Recording ends: mark the parameters that changed since the last step, and return them. Those of a step that
        was broken off are marked already.
        """
        self.check_links(self.clock.step)
        for name in self.links.added():
            self.marks("added", name, ADDED, self.clock.step)
        foreign, stepped_by_others = (
            self.foreign(),
            {mark.name for mark in self.marks.all() if mark.kind == "other-optimiser"},
        )
        passes = self.backward_hooks.backwards - self._backwards
        unused = f"; {passes} backward passes since then were used by no recorded optimiser" if passes else ""
        for name in sorted(foreign - self.replaced - stepped_by_others - set(unfinished)):
            self.marks("changed-at-end", name, AT_END + unused, self.clock.step)
        return foreign

    def certificate(self, certified: Mapping[str, Agreement], foreign: Container[str]) -> dict[str, Agreement]:
        """The certificate without parameters whose weights are foreign; the error of a replaced one is infinite."""
        own = {name: line for name, line in certified.items() if name not in foreign}
        return own | {name: Agreement(math.inf, 0.0) for name in certified if name in self.replaced}

    @uncompiled
    def _after_any(self, optimizer: optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Any optimiser took a step: mark the weights that it changed, unless it is a recorded one."""
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
                    self.mark_is_known([name])
