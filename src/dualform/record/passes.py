"""From a forward and a backward pass to slots: hooks on the recorded modules.

A forward hook remembers the layer's input, a hook on the backward step of its output the error. When the backward pass
is over, each parameter is asked whether anything was added to its gradient (``torch.autograd.grad`` with respect to
something else runs the same backward steps and adds nothing), and if so both are copied. Between the matrix products of
training every line of Python runs cold, so the hooks there do little, and what can wait longer is done for many steps
at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualform.errors import UnsupportedLayer
from dualform.memory import Arena, Desk, Room, encode_into
from dualform.types import DType

from .book import Book
from .gradients import Follower, Opened
from .layers import Call, Found, Point
from .notes import Batch, Notes
from .patch import columns_for
from .plan import Plan, Recorded, Use
from .ranks import Ranks
from .stage import SHARD_BYTES, Slots, Stage

CHECKED, AT_FIRST = 12, 3
"""In every backward pass one parameter in so many is checked, in turn; more of them in the first passes."""

FIRST = 64
"""Passes that count as the first."""


class Forward(NamedTuple):
    """A call of a module that has run forwards: how many errors it waits for, its batch, its place among the calls of
    that batch, and the parameters of each map that are trained.
    """

    call: Call
    points: int
    uses: Sequence[Use]
    batch: Batch
    number: int
    trained: Sequence[Sequence[Follower]]


@dataclass(slots=True)
class UnderWay:
    """A backward pass that is not over yet."""

    opened: dict[Follower, Opened] = field(default_factory=dict)
    calls: dict[int, tuple[Forward, list[Tensor | None]]] = field(default_factory=dict)
    """The calls that it has reached, and the errors at their points so far. Nothing is copied yet."""


Place = tuple[Mapping[str, Tensor | None], str, Follower]
"""Where a module holds a parameter, its name there, and who follows its gradient."""


class Passes:
    """Collects the slots of every backward pass."""

    def __init__(
        self, plan: Plan, dtype: DType, followers: Mapping[str, Follower], notes: Notes, book: Book, ranks: Ranks
    ) -> None:  # fmt: skip
        self.plan, self.followers, self.notes, self.book, self.ranks = plan, followers, notes, book, ranks
        self.arena: Arena
        """Where slots lie until they are written."""
        self.bytes = 0
        """How much they are by now."""
        self.backwards = 0
        """The backward passes that added to gradients."""
        self.open = True
        expected = SHARD_BYTES // max(1, plan.bytes_a_row(dtype))  # if all layers see the same rows
        self._stages = {
            layer.name: Stage(layer, columns_for(layer, plan.patches), dtype, expected)
            for layer in plan.layers
            if layer.keep != "ledger"
        }
        self._desk = Desk()
        self._turn = 0
        self._tasks: dict[int, UnderWay] = {}

    def hook(self) -> list[Any]:
        """Put the hooks in place; returns their handles."""
        handles = []
        for recorded in self.plan.modules:
            held = [[(one.table, one.own, self.followers[one.name]) for one in use.held] for use in recorded.uses]
            handles += recorded.kind.attach(recorded.module, partial(self._forward, recorded, held))
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
        self, recorded: Recorded, held: Sequence[Sequence[Place]], call: Call, points: Sequence[Point]
    ) -> None:
        trained = []
        for some in held:
            mine = []
            for table, own, follower in some:
                parameter = follower.parameter
                if table[own] is not parameter:
                    raise _replaced(follower.name, table[own])
                if parameter.requires_grad:
                    mine.append(follower)
            trained.append(mine)
        if not any(trained):
            return
        if torch._C._current_graph_task_id() == -1:  # else this runs inside a backward pass: activation checkpointing
            self.notes.before_forward()
        batch, name = self.notes.batch, recorded.uses[0].info.name
        number = batch.calls[name]
        batch.calls[name] = number + 1
        forward = Forward(call, len(points), recorded.uses, batch, number, trained)
        for i, point in enumerate(points):
            point.node.register_prehook(partial(self._error, forward, i, point.number))

    def _error(self, forward: Forward, point: int, output: int, errors: tuple[Tensor | None, ...]) -> None:
        error = errors[output]
        if not self.open or error is None:
            return
        task = torch._C._current_graph_task_id()
        under_way = self._tasks.get(task)
        if under_way is None:
            under_way = self._tasks[task] = UnderWay()
            self._turn += 1
            _at_the_end(partial(self._ended if self.ranks.alone else self._after_others, task))
        known = under_way.calls.get(id(forward))
        if known is None:
            known = under_way.calls[id(forward)] = forward, [None] * forward.points
            for mine in forward.trained:
                for follower in mine:
                    if follower not in under_way.opened:
                        every = AT_FIRST if self._turn <= FIRST else CHECKED
                        checked = (len(under_way.opened) + self._turn) % every == 0
                        under_way.opened[follower] = follower.begin(checked)
        before = known[1][point]
        known[1][point] = error.detach() if before is None else before + error.detach()

    def _after_others(self, task: int) -> None:
        """Come again when gradients have been averaged: ``DistributedDataParallel`` does that at the end, too."""
        _at_the_end(partial(self._ended, task))

    def _ended(self, task: int) -> None:
        """The backward pass is over: what was added to the gradients counts, the rest of it is forgotten."""
        under_way = self._tasks.pop(task)
        added = [follower for follower, opened in under_way.opened.items() if follower.has_more(opened)]
        new = []
        for forward, errors in under_way.calls.values() if added else ():
            users = [[follower for follower in mine if follower in added] for mine in forward.trained]
            if any(users):
                for found in forward.call.rows(errors):
                    opened = [(follower, under_way.opened[follower]) for follower in users[found.map]]
                    if opened and found.error is not None and found.key.numel():
                        new.append(self._take(forward, found, opened))
        if rooms := [each for each in new if each[1]]:
            self._encode(rooms)
        self.backwards += bool(added)
        for follower in added:
            follower.end(under_way.opened[follower], waits=id(follower.parameter) not in self.plan.owner)

    def _take(
        self, forward: Forward, found: Found, users: Sequence[tuple[Follower, Opened]]
    ) -> tuple[Slots, list[Room]]:
        """Make slots of a call: what is to be copied, and where to."""
        use, key, error = forward.uses[found.map], found.key, found.error
        assert error is not None
        layer = use.layer
        slots = Slots(layer, use.info.name, tuple(key.shape[:-1]), forward.batch, forward.number)
        if key.ndim != 2 or error.ndim != 2:
            key, error = key.reshape(-1, layer.key_size), error.reshape(-1, layer.d_out)
        slots.batch.arrived = True
        rooms: list[Room] = []
        if layer.booked:
            slots.end = len(key)
            slots.eps = torch.finfo(error.dtype).eps
            self.book.take(slots, key, error, users)
        if layer.keep != "ledger":
            stage = self._stages[layer.name]
            rooms = stage.take(slots, key, error, self.arena)
            self.bytes += len(key) * stage.row_bytes
        for follower, opened in users:
            follower.call(opened, slots, key, error)
        return slots, rooms

    def _encode(self, new: Sequence[tuple[Slots, list[Room]]]) -> None:
        """Copy all calls of a pass."""
        finite = iter(encode_into([room for _, rooms in new for room in rooms], self._desk))
        for slots, rooms in new:
            slots.finite = all([next(finite) for _ in rooms])
            slots.run.follow(slots.begin, slots.end)


def _at_the_end(callback: Callable[[], None]) -> None:
    """Call it when the backward pass under way is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _replaced(name: str, now: Tensor | None) -> UnsupportedLayer:
    if not isinstance(now, nn.Parameter):
        return UnsupportedLayer(
            f"the parameter '{name}' was swapped for another tensor during this call, as torch.func.functional_call "
            "does; gradients then go to that tensor, and not to the parameter that the optimiser trains. Use a copy of "
            "the model there, functional_call(copy.deepcopy(model), …), or record a loop that calls the model itself."
        )
    return UnsupportedLayer(
        f"the parameter '{name}' was replaced by another one while it was being recorded, so nothing says how the new "
        "one came about. Change parameters in place (parameter.data.copy_), or record anew after the change; for "
        "torch.func.functional_call use a copy of the model."
    )
