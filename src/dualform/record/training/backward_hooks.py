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
from dualform.store import EncodingWorkspace, RowTarget, SlotArena, encode_into, square_of
from dualform.types import DType

from ..distributed import Ranks
from ..hooks import Interrupts, uncompiled
from ..layers import ErrorPoint, MapRows, ModuleCall
from ..plan import MapUse, RecordedModule, RecordingPlan, columns_for
from ..rows import RowCredit
from ..slots import SHARD_BYTES, Batch, BatchColumns, CallSlots, ModelCall, ModelCalls, SlotBuffer
from ..verify import GradientFollower, OpenPass, probe_call
from .live_ledger import LiveLedger


class ForwardCall(NamedTuple):
    """A call of a module that has run forwards: how many errors it waits for, its batch, its place among the calls of
    that batch and inside the user's call, and the parameters of each map that are trained.
    """

    call: ModuleCall
    points: int
    uses: Sequence[MapUse]
    batch: Batch
    number: int
    entry: ModelCall | None
    order: int | None
    trained: Sequence[Sequence[GradientFollower]]


@dataclass(slots=True)
class BackwardPass:
    """A backward pass that is not over yet."""

    opened: dict[GradientFollower, OpenPass] = field(default_factory=dict)
    calls: dict[int, tuple[ForwardCall, list[Tensor | None]]] = field(default_factory=dict)
    """The calls that it has reached, and the errors at their points so far. Nothing is copied yet."""


ParameterPlace = tuple[Mapping[str, Tensor | None], str, GradientFollower]
"""Where a module holds a parameter, its name there, and who follows its gradient."""


class BackwardHooks:
    """Collects the slots of every backward pass."""

    def __init__(
        self,
        plan: RecordingPlan,
        dtype: DType,
        followers: dict[str, GradientFollower],
        notes: BatchColumns,
        ledger: LiveLedger,
        credit: RowCredit,
        ranks: Ranks,
        interrupts: Interrupts,
    ) -> None:
        self.plan, self.followers, self.notes, self.ledger, self.ranks = plan, followers, notes, ledger, ranks
        self.credit, self.interrupts = credit, interrupts
        self.entries = ModelCalls(
            plan.model,
            notes.begin_call,
            lambda call, module, args, kwargs: credit.see(call, module, args, kwargs, notes.batch.size),
            lambda: interrupts.interruptions,
        )
        self.arena: SlotArena
        """Where slots lie until they are written."""
        self.bytes = 0
        """How much they are by now."""
        self.backwards = 0
        """The backward passes that added to gradients."""
        self.unseen: dict[str, str] = {}
        """Parameters that forward passes since the last step used outside of their layer's linear map, and why."""
        self.open = True
        expected = SHARD_BYTES // max(1, plan.bytes_a_row(dtype))  # if all layers see the same rows
        self._stages = {
            layer.name: SlotBuffer(layer, columns_for(layer, plan.patches), dtype, expected)
            for layer in plan.layers
            if layer.keep != "ledger"
        }
        self._desk = EncodingWorkspace()
        self._tasks: dict[int, BackwardPass] = {}
        self._places: list[list[ParameterPlace]] = []

    def hook(self) -> list[Any]:
        """Put the hooks in place; returns their handles."""
        handles = []
        for recorded in self.plan.modules:
            held = [
                [(one.table, one.own, self.followers[one.name]) for one in use.held if one.name in self.followers]
                for use in recorded.uses
            ]
            self._places += held
            unseen = partial(self._unseen, {place[1]: place[2] for places in held for place in places})
            handles += recorded.kind.attach(recorded.module, partial(self._forward, recorded, held), unseen)
        return [*handles, self.entries.hook()]

    def forget(self, name: str) -> GradientFollower:
        """Follow a parameter no longer."""
        follower = self.followers.pop(name)
        follower.passes = []
        for places in self._places:
            places[:] = [place for place in places if place[2] is not follower]
        return follower

    def _unseen(self, followers: Mapping[str, GradientFollower], own_names: Sequence[str], reason: str) -> None:
        for own in own_names:
            if own in followers and followers[own].name in self.followers:
                self.unseen[followers[own].name] = reason

    def renew(self, arena: SlotArena) -> None:
        """From now on slots lie elsewhere: what lay in the old place is being written."""
        self.arena, self.bytes = arena, 0
        for stage in self._stages.values():
            stage.renew()

    def forget_unfinished(self) -> None:
        """Let go of forward and backward passes that an error broke off: when a step begins, none is under way."""
        if torch._C._current_graph_task_id() == -1:
            self._tasks = {}
            self.entries.break_off()

    @property
    def waiting(self) -> bool:
        """Whether slots wait for a step to come."""
        return any(follower.passes for follower in self.followers.values())

    @uncompiled
    def _forward(
        self,
        recorded: RecordedModule,
        held: Sequence[Sequence[ParameterPlace]],
        call: ModuleCall,
        points: Sequence[ErrorPoint],
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
        if self.credit.probing:
            self.credit.reached_model = True
            return
        name, entry, order = recorded.uses[0].info.name, self.entries.current, None
        if torch._C._current_graph_task_id() == -1:
            if entry is None or not entry.calls:
                self.notes.begin_forward()
            order = self.entries.number(name)
        else:  # inside a backward pass: activation checkpointing
            self.notes.begin_again()
            entry, order = (self.entries.last, None) if entry is None else (entry, self.entries.number(name))
        batch = self.notes.batch
        number = batch.calls[name]
        batch.calls[name] = number + 1
        forward = ForwardCall(call, len(points), recorded.uses, batch, number, entry, order, trained)
        for i, point in enumerate(points):
            point.node.register_prehook(partial(self._error, forward, i, point.number))

    @uncompiled
    def _error(self, forward: ForwardCall, point: int, output: int, errors: tuple[Tensor | None, ...]) -> None:
        error = errors[output]
        if not self.open or error is None:
            return
        task = torch._C._current_graph_task_id()
        under_way = self._tasks.get(task)
        if under_way is None:
            under_way = self._tasks[task] = BackwardPass()
            ended = self.interrupts.around(partial(self._ended, task))
            # come again when gradients have been averaged: ``DistributedDataParallel`` does that at the end, too
            _at_the_end(ended if self.ranks.alone else partial(_at_the_end, ended))
        known = under_way.calls.get(id(forward))
        if known is None:
            known = under_way.calls[id(forward)] = forward, [None] * forward.points
            for mine in forward.trained:
                for follower in mine:
                    if follower not in under_way.opened:
                        under_way.opened[follower] = follower.begin()
        before = known[1][point]
        known[1][point] = error.detach() if before is None else before + error.detach()

    @uncompiled
    def _ended(self, task: int) -> None:
        """The backward pass is over: what was added to the gradients counts, the rest of it is forgotten."""
        under_way = self._tasks.pop(task)
        added = [follower for follower, opened in under_way.opened.items() if follower.has_more(opened)]
        new = []
        for forward, errors in under_way.calls.values() if added else ():
            users = [[follower for follower in mine if follower in added] for mine in forward.trained]
            if any(users):
                for place, found in enumerate(forward.call.rows(errors)):
                    opened = [(follower, under_way.opened[follower]) for follower in users[found.map]]
                    if opened and found.error is not None and found.key.numel():
                        new.append(self._take(forward, place, found, opened))
        if rooms := [each for each in new if each[1]]:
            self._encode(rooms)
        self.backwards += bool(added)
        self.entries.settle()
        for follower in added:
            follower.end(under_way.opened[follower], waits=id(follower.parameter) not in self.plan.owner)

    def _take(
        self, forward: ForwardCall, place: int, found: MapRows, users: Sequence[tuple[GradientFollower, OpenPass]]
    ) -> tuple[CallSlots, list[RowTarget]]:
        """Make slots of a call: what is to be copied, and where to."""
        use, key, error = forward.uses[found.map], found.key, found.error
        assert error is not None
        layer = use.layer
        batch = self.notes.arrived(forward.batch)
        number = forward.number + forward.batch.calls_before[forward.uses[0].info.name]
        slots = CallSlots(layer, use.info.name, tuple(key.shape[:-1]), batch, number)
        slots.entry, slots.order, slots.place = forward.entry, forward.order, (forward.uses[0].info.name, place)
        if key.ndim != 2 or error.ndim != 2:
            key, error = key.reshape(-1, layer.key_size), error.reshape(-1, layer.d_out)
        self.credit.of(slots)
        rooms: list[RowTarget] = []
        if layer.in_ledger:
            slots.end = len(key)
            slots.eps = torch.finfo(error.dtype).eps
            self.ledger.take(slots, key, error, users)
        if layer.keep != "ledger":
            stage = self._stages[layer.name]
            rooms = stage.take(slots, key, error, self.arena)
            self.bytes += len(key) * stage.row_bytes
        if layer.indexed:
            slots.key_square = len(key)
        elif layer.keep == "ledger":
            slots.key_square = square_of(key)
        if layer.keep != "slots":
            slots.error_square = square_of(error)
        probed = probe_call([follower.probe for follower, _ in users], layer, key, error)
        for (_, opened), part in zip(users, probed, strict=True):
            opened.slots.append(slots)
            opened.probed.append(part)
        return slots, rooms

    def _encode(self, new: Sequence[tuple[CallSlots, list[RowTarget]]]) -> None:
        """Copy all calls of a pass."""
        copied = iter(encode_into([room for _, rooms in new for room in rooms], self._desk))
        for slots, rooms in new:
            for room in rooms:
                seen = next(copied)
                slots.finite = slots.finite and seen.finite
                if room.scaled:
                    slots.error_square = seen.square
                else:
                    slots.key_square = seen.square
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
