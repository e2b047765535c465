"""From a forward and a backward pass to slots: hooks on the recorded modules.

A forward hook remembers the layer's input, a hook on the backward step of its output the error. When the backward pass
is over, each parameter is asked whether anything was added to its gradient (``torch.autograd.grad`` with respect to
something else runs the same backward steps and adds nothing), and if so both are copied. Between the matrix products of
training every line of Python runs cold, so the hooks there do little, and what can wait longer is done for many steps
at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualform.errors import UnsupportedLayer
from dualform.memory import Arena, Desk, Room, encode_into
from dualform.types import DType, LayerInfo

from .gradients import Follower, Opened
from .linear import key_of, node_of
from .notes import Batch, Notes
from .plan import Plan
from .stage import SHARD_BYTES, Slots, Stage

CHECKED, AT_FIRST = 12, 3
"""In every backward pass one parameter in so many is checked, in turn; more of them in the first passes."""

FIRST = 64
"""Passes that count as the first."""


class Backward(NamedTuple):
    """A call of a layer that a backward pass has reached: its input and its error, not copied yet."""

    layer: LayerInfo
    module: str
    key: Tensor
    error: Tensor
    batch: Batch
    number: int
    trained: Sequence[Follower]


@dataclass(slots=True)
class UnderWay:
    """A backward pass that is not over yet."""

    opened: dict[Follower, Opened] = field(default_factory=dict)
    calls: list[Backward] = field(default_factory=list)


class Passes:
    """Collects the slots of every backward pass."""

    def __init__(self, plan: Plan, dtype: DType, followers: Mapping[str, Follower], notes: Notes) -> None:
        self.plan, self.followers, self.notes = plan, followers, notes
        self.arena: Arena
        """Where slots lie until they are written."""
        self.bytes = 0
        """How much they are by now."""
        self.open = True
        expected = SHARD_BYTES // plan.bytes_a_row(dtype)  # if all layers see the same rows
        self._stages = {layer.name: Stage(layer, dtype, expected) for layer in plan.layers}
        self._desk = Desk()
        self._turn = 0
        self._tasks: dict[int, UnderWay] = {}

    def hook(self) -> list[Any]:
        """Put the hooks in place; returns their handles."""
        handles = []
        for layer in self.plan.layers:
            for info in layer.modules:
                names = (("weight", layer.weight), ("bias", info.bias))
                followers = [(own, self.followers[name]) for own, name in names if name is not None]
                hook = partial(self._forward, layer, info.name, followers)
                module = self.plan.modules[info.name]
                handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        return handles

    def renew(self, arena: Arena) -> None:
        """From now on slots lie elsewhere: what lay in the old place is being written."""
        self.arena, self.bytes = arena, 0
        for stage in self._stages.values():
            stage.renew()

    @property
    def waiting(self) -> bool:
        """Whether slots wait for a step to come."""
        return any(follower.passes for follower in self.followers.values())

    def _forward(
        self, layer: LayerInfo, name: str, followers: Sequence[tuple[str, Follower]], module: nn.Linear, args: tuple,
        kwargs: dict, output: Tensor,
    ) -> None:  # fmt: skip
        if not output.requires_grad:
            return
        trained, parameters = [], module._parameters
        for own, follower in followers:
            parameter = follower.parameter
            if parameters[own] is not parameter:
                raise _replaced(follower.name)
            if parameter.requires_grad:
                trained.append(follower)
        if not trained:
            return
        if torch._C._current_graph_task_id() == -1:  # else this runs inside a backward pass: activation checkpointing
            self.notes.before_forward()
        batch = self.notes.batch
        number = batch.calls[name]
        batch.calls[name] = number + 1
        key = key_of(args, kwargs, output, owned=trained[0].name == layer.weight)
        hook = partial(self._error, layer, name, key, batch, number, trained)
        node_of(output).register_prehook(hook)

    def _error(
        self, layer: LayerInfo, module: str, key: Tensor, batch: Batch, number: int, trained: Sequence[Follower],
        errors: tuple[Tensor | None, ...],
    ) -> None:  # fmt: skip
        error = errors[0]
        if not self.open or error is None:
            return
        task = torch._C._current_graph_task_id()
        under_way = self._tasks.get(task)
        if under_way is None:
            under_way = self._tasks[task] = UnderWay()
            self._turn += 1
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._ended, task))
        for follower in trained:
            if follower not in under_way.opened:
                every = AT_FIRST if self._turn <= FIRST else CHECKED
                under_way.opened[follower] = follower.begin((len(under_way.opened) + self._turn) % every == 0)
        if key.numel():
            under_way.calls.append(Backward(layer, module, key, error.detach(), batch, number, trained))

    def _ended(self, task: int) -> None:
        """The backward pass is over: what was added to the gradients counts, the rest of it is forgotten."""
        under_way = self._tasks.pop(task)
        added = [follower for follower, opened in under_way.opened.items() if follower.has_more(opened)]
        new = []
        for call in under_way.calls if added else ():
            users = [follower for follower in call.trained if follower in added]
            if users:
                new.append(self._take(call, [(follower, under_way.opened[follower]) for follower in users]))
        if new:
            self._encode(new)
        for follower in added:
            follower.end(under_way.opened[follower], waits=id(follower.parameter) not in self.plan.optimised)

    def _take(self, call: Backward, users: Sequence[tuple[Follower, Opened]]) -> tuple[Slots, list[Room]]:
        """Make slots of a call: what is to be copied, and where to."""
        layer, key, error = call.layer, call.key, call.error
        slots = Slots(layer, call.module, tuple(key.shape[:-1]), call.batch, call.number)
        if key.ndim != 2:
            key, error = key.reshape(-1, layer.d_in), error.reshape(-1, layer.d_out)
        stage = self._stages[layer.name]
        rooms = stage.take(slots, key, error, self.arena)
        self.bytes += len(key) * stage.row_bytes
        slots.batch.arrived = True
        for follower, opened in users:
            follower.call(opened, slots, key, error)
        return slots, rooms

    def _encode(self, new: Sequence[tuple[Slots, list[Room]]]) -> None:
        """Copy all calls of a pass."""
        finite = iter(encode_into([room for _, rooms in new for room in rooms], self._desk))
        for slots, rooms in new:
            slots.finite = all([next(finite) for _ in rooms])
            slots.run.follow(slots.begin, slots.end)


def _replaced(name: str) -> UnsupportedLayer:
    return UnsupportedLayer(
        f"the parameter '{name}' was replaced by another tensor while it was being recorded, so nothing says how the "
        "new one came about. Change parameters in place (parameter.data.copy_), or record anew after the change."
    )
