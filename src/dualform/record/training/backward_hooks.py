"""From a forward and a backward pass to slots: hooks on the recorded modules.

A forward hook keeps the layer's input, a hook on the backward step of its output keeps the error. When the backward
pass is over, both are copied for each parameter whose gradient has changed (``torch.autograd.grad`` with respect to
something else runs the same backward steps and adds nothing). Between the matrix products of training every line of
Python runs cold, so the hooks there do little, and whatever can wait is done later, for many steps at once.
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
from ..slots import SHARD_BYTES, Batch, BatchColumns, CallSlots, CallWatcher, ModelCall, ModelCalls, SlotBuffer
from ..verify import GradientFollower, OpenPass, probe_call
from .live_ledger import LiveLedger


class ForwardCall(NamedTuple):
    """A call of a module that has run forwards: the number of errors it waits for, its batch, its number among the
    calls of that batch and inside the user's call, and the trained parameters of each map.
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
    """The calls that it has reached, with the errors at their points so far. Nothing is copied yet."""


ParameterPlace = tuple[Mapping[str, Tensor | None], str, GradientFollower]
"""The table of a module that holds a parameter, its name in the table, and the follower of its gradient."""


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
        call_watcher: CallWatcher | None = None,
    ) -> None:
        self.plan, self.followers, self.notes, self.ledger, self.ranks = plan, followers, notes, ledger, ranks
        self.credit, self.interrupts = credit, interrupts
        self.entries = ModelCalls(
            plan.model,
            notes.begin_call,
            lambda call, module, args, kwargs: credit.see(call, module, args, kwargs, notes.batch.size),
            lambda: interrupts.interruptions,
            call_watcher,
        )
        self.arena: SlotArena
        """The memory of slots until they are written."""
        self.bytes = 0
        """The bytes of these slots."""
        self.backwards = 0
        """The backward passes that added to gradients."""
        self.unseen: dict[str, str] = {}
        """Parameters that forward passes since the last step used outside of their layer's linear map, and why."""
        self.open = True
        expected = SHARD_BYTES // max(1, plan.bytes_a_row(dtype))  # if all layers see the same rows
        self._buffers = {
            layer.name: SlotBuffer(layer, columns_for(layer, plan.patches), dtype, expected)
            for layer in plan.layers
            if layer.keep != "ledger"
        }
        self._workspace = EncodingWorkspace()
        self._backward_passes: dict[int, BackwardPass] = {}
        self._places: list[list[ParameterPlace]] = []

    def hook(self) -> list[Any]:
        """Put the hooks in place; returns their handles."""
        handles = []
        for recorded in self.plan.modules:
            places = self._parameter_places(recorded)
            self._places += places
            unseen = partial(self._unseen, {place[1]: place[2] for map_places in places for place in map_places})
            handles += recorded.kind.attach(recorded.module, partial(self._forward, recorded, places), unseen)
        return [*handles, self.entries.hook()]

    def _parameter_places(self, recorded: RecordedModule) -> list[list[ParameterPlace]]:
        """Where the parameters of each map of a module are held."""
        followers = self.followers
        return [
            [
                (parameter.table, parameter.own, followers[parameter.name])
                for parameter in use.parameters
                if parameter.name in followers
            ]
            for use in recorded.uses
        ]

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
        """Store slots in another arena from now on: those in the old one are being written."""
        self.arena, self.bytes = arena, 0

    def forget_unfinished(self) -> None:
        """Drop forward and backward passes that an error broke off: when a step begins, none is under way."""
        if torch._C._current_graph_task_id() == -1:
            self._backward_passes = {}
            self.entries.break_off()

    @property
    def waiting(self) -> bool:
        """Whether slots wait for their step."""
        return any(follower.passes for follower in self.followers.values())

    @uncompiled
    def _forward(
        self,
        recorded: RecordedModule,
        places: Sequence[Sequence[ParameterPlace]],
        call: ModuleCall,
        points: Sequence[ErrorPoint],
    ) -> None:
        trained = []
        for map_places in places:
            map_trained = []
            for table, own, follower in map_places:
                parameter = follower.parameter
                if table[own] is not parameter:
                    raise _replaced_error(follower.name, table[own])
                if parameter.requires_grad:
                    map_trained.append(follower)
            trained.append(map_trained)
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
        under_way = self._backward_passes.get(task)
        if under_way is None:
            under_way = self._backward_passes[task] = BackwardPass()
            ended = self.interrupts.around(partial(self._ended, task))
            # run once more when gradients have been averaged: ``DistributedDataParallel`` does that at the end, too
            _at_the_end(ended if self.ranks.alone else partial(_at_the_end, ended))
        reached = under_way.calls.get(id(forward))
        if reached is None:
            reached = under_way.calls[id(forward)] = forward, [None] * forward.points
            for map_trained in forward.trained:
                for follower in map_trained:
                    if follower not in under_way.opened:
                        under_way.opened[follower] = follower.begin()
        before = reached[1][point]
        reached[1][point] = error.detach() if before is None else before + error.detach()

    @uncompiled
    def _ended(self, task: int) -> None:
        """The backward pass is over: copy the slots of the calls that have added to gradients, and drop the others."""
        under_way = self._backward_passes.pop(task)
        added = [follower for follower, opened in under_way.opened.items() if follower.has_more(opened)]
        new = []
        for forward, errors in under_way.calls.values() if added else ():
            users = [[follower for follower in trained if follower in added] for trained in forward.trained]
            if any(users):
                for place, rows in enumerate(forward.call.rows(errors)):
                    opened = [(follower, under_way.opened[follower]) for follower in users[rows.map]]
                    if opened and rows.error is not None and rows.key.numel():
                        new.append(self._take(forward, place, rows, opened))
        if to_encode := [(slots, targets) for slots, targets in new if targets]:
            self._encode(to_encode)
        self.backwards += bool(added)
        self.entries.settle()
        for follower in added:
            follower.end(under_way.opened[follower], waits=follower.parameter not in self.plan.owners)

    def _take(
        self, forward: ForwardCall, place: int, rows: MapRows, users: Sequence[tuple[GradientFollower, OpenPass]]
    ) -> tuple[CallSlots, list[RowTarget]]:
        """Make slots of a call: returns them, and the rows that are to be copied with their targets."""
        use, key, error = forward.uses[rows.map], rows.key, rows.error
        assert error is not None
        layer = use.layer
        batch = self.notes.arrived(forward.batch)
        number = forward.number + forward.batch.calls_before[forward.uses[0].info.name]
        slots = CallSlots(layer, use.info.name, tuple(key.shape[:-1]), batch, number)
        slots.entry, slots.order, slots.place = forward.entry, forward.order, (forward.uses[0].info.name, place)
        if key.ndim != 2 or error.ndim != 2:
            key, error = key.reshape(-1, layer.key_size), error.reshape(-1, layer.d_out)
        self.credit.owners_of(slots)
        targets: list[RowTarget] = []
        if layer.in_ledger:
            slots.end = len(key)
            slots.eps = torch.finfo(error.dtype).eps
            self.ledger.take(slots, key, error, users)
        if layer.keep != "ledger":
            buffer = self._buffers[layer.name]
            targets = buffer.take(slots, key, error, self.arena)
            self.bytes += len(key) * buffer.row_bytes
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
        return slots, targets

    def _encode(self, new: Sequence[tuple[CallSlots, list[RowTarget]]]) -> None:
        """Copy the rows of all calls of a pass, encoded as on disk."""
        encoded = iter(encode_into([target for _, targets in new for target in targets], self._workspace))
        for slots, targets in new:
            for target in targets:
                summary = next(encoded)
                slots.finite = slots.finite and summary.finite
                if target.scaled:
                    slots.error_square = summary.square
                else:
                    slots.key_square = summary.square
            slots.run.follow(slots.begin, slots.end)


def _at_the_end(callback: Callable[[], None]) -> None:
    """Call it when the backward pass under way is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _replaced_error(name: str, now: Tensor | None) -> UnsupportedLayer:
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
