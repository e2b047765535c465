"""Keeps what is needed to run a training again: which examples each step saw, settings, random numbers, whole states.

It stands beside whatever else is kept of a run (``record(…, replay="2 GB")``), or alone (``keep="replay"``). Then the
recorded layers have no hooks, and the batches of a step are those that :class:`PassWatch` has seen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn, optim

from dualform.errors import RecordError
from dualform.sizes import bytes_of_tensors, in_bytes
from dualform.store import (
    GroupStep,
    Modes,
    PendingShard,
    RunLog,
    RunLogLines,
    gradient_norm,
    settings_of,
    state_of,
    weights_checksum,
)

from ..hooks import Interrupts
from ..plan import RecordingPlan
from ..slots import Batch, BatchColumns, ModelCall, ModelCalls
from ..training import NewBatch
from .pass_watch import PassWatch
from .state_schedule import StateSchedule

STATES = 10
"""How many whole states are kept if the user gives no budget."""

INDEX_COLUMN = "index"

UNNOTED = (
    "a batch of step {step} was not noted with an index, so nothing says which examples it holds, and it cannot be run "
    "again. Write tape.note(index=…) for every batch, or record without replay."
)
REGROUPED = "an optimiser got other parameter groups at step {step}, and only the steps before can be run again"


class RunKeeper:
    """Watches the calls of the model and the steps of its optimisers. ``log`` is what the manifest says of the run."""

    def __init__(
        self,
        plan: RecordingPlan,
        optimizers: Sequence[optim.Optimizer],
        notes: BatchColumns,
        interrupts: Interrupts,
        log: RunLog,
        budget: int | None,
    ) -> None:
        self.plan, self.optimizers, self.notes, self.log, self.only = plan, optimizers, notes, log, log.only
        self.watch = PassWatch(optimizers, notes, interrupts)
        self.calls = ModelCalls(plan.model, self._call_begins, self._call_ends, lambda: interrupts.interruptions)
        """The user's calls, where no layer is recorded."""
        self._budget, self._schedule = budget, StateSchedule(0)
        self._size_is_known = False
        self._names = {id(tensor): name for name, tensor in plan.tensors.items()}
        self._weights = plan.trained
        self._modules = list(plan.model.named_modules())
        self._parameters = list(plan.model.named_parameters())
        self._generator = torch.get_rng_state()
        self._end: Tensor | None = None
        """The state of the generator after the last pass of the run: random numbers go on from there."""
        self._gradient = 0.0
        self._settings: dict[str, float] = {}
        self._groups = self._group_sizes()
        self._batches: dict[int, list[Batch]] = {}
        """By step, the batches that it used first, where no layer is recorded."""

    @property
    def backwards(self) -> int:
        """The backward passes that added to gradients, where no layer is recorded."""
        return self.watch.backwards

    @property
    def waiting(self) -> bool:
        """Whether gradients wait for their step, where no layer is recorded."""
        return bool(self.watch.batches)

    # ---------------------------------------------------------------------------------------- calls and passes

    def hook(self) -> list[Any]:
        """Watch the calls of the model, in place of hooks on recorded layers; returns the handles."""
        return [self.calls.hook()]

    def _call_begins(self, gradients: bool, by_user: bool) -> None:
        self.notes.begin_call(gradients, by_user)
        if gradients and by_user and self.calls.current is not None:
            self._generator = torch.get_rng_state()
            self.calls.current.calls[""] += 1
            self.notes.begin_forward()
            self.batch_begins(self.notes.batch)

    def _call_ends(
        self, call: ModelCall, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        self._call_is_over()
        self.watch.called(output)

    def around_calls(
        self, began: Callable[[bool, bool], None], ended: Callable[..., None]
    ) -> tuple[Callable[[bool, bool], None], Callable[..., None]]:
        """Callbacks for calls that recorded layers watch, which tell this object, too."""

        def begins(gradients: bool, by_user: bool) -> None:
            began(gradients, by_user)
            if gradients and by_user:
                self._generator = torch.get_rng_state()

        def ends(call: ModelCall, *arguments: Any) -> None:
            self._call_is_over()
            ended(call, *arguments)

        return begins, ends

    def batch_begins(self, batch: Batch) -> None:
        """A forward pass belongs to this batch; if it is the first one, remember what it begins with."""
        if batch.generators is None:
            batch.generators = self._generator, self._generator
            batch.modes = (
                tuple([name for name, module in self._modules if not module.training]),
                tuple([name for name, parameter in self._parameters if not parameter.requires_grad]),
            )

    def _call_is_over(self) -> None:
        batch = self.notes.batch
        if batch.generators is not None:
            batch.generators = batch.generators[0], torch.get_rng_state()

    # --------------------------------------------------------------------------------------------------- steps

    def before_step(self, step: int, optimizer: optim.Optimizer, batches: Iterable[Batch]) -> None:
        """The gradients of a step are final; ``batches`` are those that recorded layers have seen in it."""
        self._gradient = gradient_norm([p.grad for group in optimizer.param_groups for p in group["params"]])
        batches = self.watch.batches if self.only else batches
        for batch in batches:
            if INDEX_COLUMN not in batch.columns:
                raise RecordError(UNNOTED.format(step=step))
            if self.only:
                self.notes.check(batch)

    def after_step(
        self, step: int, optimizer: optim.Optimizer, batches: Iterable[Batch], pending: PendingShard
    ) -> None:
        """An optimiser has taken a step, or its part of one."""
        lines = pending.log
        if self.only:
            batches, self.watch.batches = self.watch.batches, []
            self._batches.setdefault(step, []).extend(batches)
        for batch in batches:
            if not batch.in_run:
                self._go_on_from(batch, step, lines)
        number = next(i for i, own in enumerate(self.optimizers) if own is optimizer)
        checksum = weights_checksum(self._weights)
        for place, group in enumerate(optimizer.param_groups):
            settings = settings_of(group)
            if settings != self._settings:
                self._settings = settings
            lines.steps.append(GroupStep(step, number, place, self._settings, self._gradient, checksum))
        if not self.log.broken and self._groups != self._group_sizes():
            self._revise(lines, broken=REGROUPED.format(step=step))
        self._keep_state(step, pending)

    def _go_on_from(self, batch: Batch, step: int, lines: RunLogLines) -> None:
        """A pass of the run: note the state of the generator where it is not that after the pass before."""
        batch.in_run = batch.done = True
        if batch.generators is not None:
            begin, end = batch.generators
            batch.generator = None if self._end is not None and torch.equal(begin, self._end) else begin
            batch.generators, self._end = None, end
        last = self.log.modes[-1] if self.log.modes else Modes(0, (), ())
        if batch.modes != (last.evaluating, last.without_gradient):
            self._revise(lines, modes=(*self.log.modes, Modes(step, *batch.modes)))

    def _revise(self, lines: RunLogLines, **changes: Any) -> None:
        self.log = lines.revised = replace(self.log, **changes)

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups]

    def new_batches(self, steps: Iterable[int]) -> list[NewBatch]:
        """The batches that these steps use for the first time."""
        return [
            NewBatch(step, number, batch.size or 0, batch)
            for step in steps
            for number, batch in enumerate(self._batches.get(step, []))
            if batch.visit < 0
        ]

    def forget(self, steps: Iterable[int]) -> None:
        """The visits of these steps are numbered."""
        for step in steps:
            self._batches.pop(step, None)

    # -------------------------------------------------------------------------------------------------- states

    def _keep_state(self, step: int, pending: PendingShard) -> None:
        """Keep the whole state after a step, if one is due. Another optimiser may take its part of the step later."""
        if not self._size_is_known:
            self._size_is_known, self._schedule = True, self._make_schedule()
        again = step in self._schedule.kept[-1:]
        if not again and not self._schedule.due(step):
            return
        pending.log.states[step] = state = self._state()
        pending.kept += bytes_of_tensors(state.values())
        for dropped in () if again else self._schedule.add(step):
            pending.log.dropped.add(dropped)
            pending.log.states.pop(dropped, None)

    def keep_first_state(self, pending: PendingShard) -> None:
        """Keep the state before the first step if an optimiser begins with one (a loaded momentum)."""
        if any(optimizer.state for optimizer in self.optimizers):
            pending.log.states[0] = self._state()

    def announcement(self) -> str:
        """What is kept, in a sentence; known after the first step."""
        size, most = bytes_of_tensors(self._state().values()), self._schedule.most
        if not most:
            return (
                f"the run can be run again from its first step only: a whole state takes {in_bytes(size)}, more than "
                "replay= allows."
            )
        return (
            f"the run can be run again: of its whole states, {in_bytes(size)} each, at most {most} are kept at equal "
            f"distances, {in_bytes(most * size)} in all."
        )

    def _make_schedule(self) -> StateSchedule:
        """Now that the optimisers have their state, the size of a whole state is known."""
        size = bytes_of_tensors(self._state().values())
        most = STATES if self._budget is None else self._budget // max(1, size)
        return StateSchedule(most, tuple(state.step for state in self.log.states if state.step))

    def _state(self) -> dict[str, Tensor]:
        tensors = {
            name: tensor
            for name, tensor in self.plan.tensors.items()
            if tensor in self.plan.owners or not isinstance(tensor, nn.Parameter)
        }
        states = {
            self._names[id(parameter)]: state
            for optimizer in self.optimizers
            for parameter, state in optimizer.state.items()
            if id(parameter) in self._names
        }
        return state_of(tensors, states, torch.get_rng_state() if self._end is None else self._end)
