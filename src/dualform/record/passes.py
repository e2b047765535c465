"""From a forward and a backward pass to slots: hooks on the recorded modules.

A forward hook remembers the layer's input, and a hook on the backward step of its output copies input and error. When
the backward pass is over, each parameter is asked whether anything was added to its gradient (``torch.autograd.grad``
with respect to something else runs the same backward steps and adds nothing). Between the matrix products of training
every line of Python runs cold, so all that can wait, encoding and checking, is done later for many calls at once.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.memory import Arena
from dualform.types import DType, LayerInfo

from .gradients import Follower, Pass
from .linear import key_of, node_of
from .notes import Batch, Notes
from .plan import Plan
from .stage import BYTES, Slots, Stage

CHECKED = 3
"""After every backward pass one parameter in so many is checked, in turn."""

CHOICE_LASTS = 8
"""Digests after which other entries of the gradients are watched."""


class Passes:
    """Collects the slots of every backward pass."""

    def __init__(self, plan: Plan, dtype: DType, followers: Mapping[str, Follower], notes: Notes) -> None:
        self.plan, self.followers, self.notes = plan, followers, notes
        self.dtype: DType = dtype
        self.names = {id(tensor): name for name, tensor in plan.tensors.items()}
        self.arena: Arena
        """Where encoded slots lie until they are written."""
        self.open = True
        self._stages = {layer.name: Stage(layer) for layer in plan.layers}
        self._bytes = 0
        self._digests = self._turn = 0
        self._tasks: dict[int, dict[str, list[Slots]]] = {}
        self._unchecked: list[tuple[Follower, Pass]] = []

    def hook(self) -> list[Any]:
        """Put the hooks in place; returns their handles."""
        handles = []
        for layer in self.plan.layers:
            for module in layer.modules:
                target, hook = self.plan.modules[module.name], partial(self._forward, layer, module.name)
                handles.append(target.register_forward_hook(hook, prepend=True, with_kwargs=True))
        return handles

    def _forward(
        self, layer: LayerInfo, name: str, module: nn.Linear, args: tuple, kwargs: dict, output: Tensor
    ) -> None:  # fmt: skip
        if not output.requires_grad:
            return
        trained = [self.names[id(p)] for p in (module.weight, module.bias) if p is not None and p.requires_grad]
        if not trained:
            return
        if torch._C._current_graph_task_id() == -1:  # else this runs inside a backward pass: activation checkpointing
            self.notes.before_forward()
        batch = self.notes.batch
        number = batch.calls[name]
        batch.calls[name] = number + 1
        hook = partial(self._error, layer, name, key_of(args, kwargs), batch, number, trained)
        node_of(output).register_prehook(hook)

    def _error(
        self, layer: LayerInfo, module: str, key: Tensor, batch: Batch, number: int, names: Sequence[str],
        errors: tuple[Tensor | None, ...],
    ) -> None:  # fmt: skip
        error = errors[0]
        if not self.open or error is None:
            return
        task = torch._C._current_graph_task_id()
        touched = self._tasks.get(task)
        if touched is None:
            touched = self._tasks[task] = {}
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._ended, task))
        for name in names:
            if name not in touched:
                touched[name] = []
                self.followers[name].begin_pass()
        if key.numel():
            slots = Slots(layer, module, tuple(key.shape[:-1]), batch, number)
            self._bytes += self._stages[layer.name].put(slots, key, error)
            for name in names:
                touched[name].append(slots)

    def _ended(self, task: int) -> None:
        """The backward pass is over: what was added to the gradients counts, the rest of it is forgotten."""
        for turn, (name, slots) in enumerate(self._tasks.pop(task).items(), start=self._turn):
            follower = self.followers[name]
            if follower.end_pass(slots):
                if turn % CHECKED == 0:
                    self._unchecked.append((follower, follower.passes[-1]))
                for each in slots:
                    each.batch.arrived = True
        self._turn += 1

    @property
    def full(self) -> bool:
        """Whether enough has come together to be encoded."""
        return self._bytes >= BYTES

    @property
    def waiting(self) -> bool:
        """Whether slots wait for a step to come."""
        return any(follower.passes for follower in self.followers.values())

    def digest(self) -> None:
        """Check that the gradients are made of the copies, and encode these."""
        self._check()
        for stage in self._stages.values():
            stage.encode(self.dtype, self.arena)
            stage.clear()
        self._bytes = 0

    def _check(self) -> None:
        """Compare what the passes added with the products of their slots."""
        place = {id(slots): i for stage in self._stages.values() for i, slots in enumerate(stage.slots)}
        groups: dict[tuple[int, int], list[tuple[Follower, Pass]]] = {}
        for each in self._unchecked:
            groups.setdefault((id(each[0]), id(each[1].entries)), []).append(each)
        for group in groups.values():
            follower, entries = group[0][0], group[0][1].entries
            stages = {id(s.layer): self._stages[s.layer.name] for _, added in group for s in added.slots}
            products = {key: stage.products(entries) for key, stage in stages.items()}
            expected = np.zeros((len(group), 2, len(entries.flat)))
            rows = np.zeros(len(group))
            for i, (_, added) in enumerate(group):
                for slots in added.slots:
                    at = place[id(slots)]
                    total, size = products[id(slots.layer)]
                    expected[i, 0] += total[at]
                    expected[i, 1] += size[at]
                    rows[i] += slots.end - slots.begin
            eps = max((slots.eps for _, added in group for slots in added.slots), default=0.0)
            follower.check([added for _, added in group], expected[:, 0], expected[:, 1], rows, eps)
        self._digests += 1
        if self._digests % CHOICE_LASTS == 0:  # look somewhere else for a while
            for follower in self.followers.values():
                grad = follower.parameter.grad
                if grad is not None and not follower.passes:
                    follower.choose(grad)
        self._unchecked = []
