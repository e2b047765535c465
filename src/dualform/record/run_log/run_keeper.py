"""Keeps what is needed to run a training again: which examples each step saw, settings, random numbers, whole states.

It stands beside whatever else is kept of a run (``record(…, replay="2 GB")``), or alone (``keep="replay"``). Then the
recorded layers have no hooks, and the batches of a step are those that :class:`PassWatch` has seen.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn, optim

from dualform.errors import NonFiniteGradient, RecordError
from dualform.sizes import bytes_of_tensors, in_bytes
from dualform.store import (
    NO_GRADIENT,
    GroupStep,
    Modes,
    PendingShard,
    RunLog,
    RunLogLines,
    WeightsChecksum,
    gradient_norm,
    settings_of,
    state_of,
)

from ..hooks import Interrupts
from ..plan import RecordingPlan
from ..slots import Batch, BatchColumns, ModelCall, ModelCalls
from ..training import NewBatch
from .pass_watch import PassWatch, RunPass
from .state_schedule import StateSchedule

MOST_MODES = 1000
"""How many changes between training and evaluation mode, or of frozen parameters, a log holds."""

STATES = 10
"""How many whole states are kept if the user gives no budget."""

INDEX_COLUMN = "index"

UNNOTED = (
    "a batch of step {step} was not noted with an index, so nothing says which examples it holds, and it cannot be run "
    "again. Write tape.note(index=…) for every batch, or record without replay."
)
RESTLESS = f"modules changed their mode more than {MOST_MODES} times up to step {{step}}"
NOT_FINITE = (
    "the gradients hold NaN or infinity at step {step}; the step was not taken. Lower the learning rate, clip the "
    "gradient, or look at the batch."
)
REGROUPED = "an optimiser got other parameter groups at step {step}, and only the steps before can be run again"


NO_STATE = torch.empty(0)


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
        self.interrupts = interrupts
        self.watch = PassWatch(optimizers, notes, interrupts)
        self.calls = ModelCalls(
            plan.model, notes.begin_call, lambda *_: None, lambda: interrupts.interruptions, self, alone=True
        )
        """The user's calls, where no layer is recorded."""
        self._budget, self._schedule = budget, StateSchedule(0)
        self._state_bytes: int | None = None
        """The size of a whole state, known after the first step: then the optimisers have theirs."""
        self._names = {id(tensor): name for name, tensor in plan.tensors.items()}
        self._checksum = WeightsChecksum(plan.trained)
        self._numbers = {id(optimizer): number for number, optimizer in enumerate(optimizers)}
        self._modules = list(plan.model.named_modules())
        self._parameters = list(plan.model.named_parameters())
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
        return bool(self.watch.passes)

    # ---------------------------------------------------------------------------------------- calls and passes

    def hook(self) -> list[Any]:
        """Watch the calls of the model, in place of hooks on recorded layers; returns the handles."""
        return [self.calls.hook()]

    def call_begins(self, call: ModelCall) -> None:
        """The loop calls the model, and a backward pass may follow: remember what the call begins with."""
        call.generators = torch.get_rng_state(), NO_STATE
        call.modes = (
            tuple([name for name, module in self._modules if not module.training]),
            tuple([name for name, parameter in self._parameters if not parameter.requires_grad]),
        )
        if self.only:
            call.calls[""] = 1
            self.notes.begin_forward()

    def call_ends(self, call: ModelCall, output: Any) -> None:
        """The call is over."""
        if call.generators is not None:
            call.generators = call.generators[0], torch.get_rng_state()
        if self.only:
            self.watch.called(call, output)

    # --------------------------------------------------------------------------------------------------- steps

    def before_step(self, step: int, optimizer: optim.Optimizer, passes: Iterable[RunPass]) -> None:
        """The gradients of a step are final; ``passes`` are those that recorded layers have seen."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._gradient = gradient_norm(parameters)
        if not math.isfinite(self._gradient):
            raise NonFiniteGradient(NOT_FINITE.format(step=step))
        if not self._gradient and all(parameter.grad is None for parameter in parameters):
            self._gradient = NO_GRADIENT
        for run_pass in self.watch.passes if self.only else passes:
            if INDEX_COLUMN not in run_pass.batch.columns:
                raise RecordError(UNNOTED.format(step=step))
            if self.only:
                self.notes.check(run_pass.batch)

    def after_step(
        self, step: int, optimizer: optim.Optimizer, passes: Iterable[RunPass], pending: PendingShard
    ) -> None:
        """An optimiser has taken a step, or its part of one."""
        lines = pending.log
        if self.only:
            passes, self.watch.passes = self.watch.passes, []
            self._batches.setdefault(step, []).extend(run_pass.batch for run_pass in passes)
            self.calls.settle()
        for run_pass in passes:
            if not run_pass.batch.in_run:
                run_pass.batch.in_run = run_pass.batch.done = True
                self._go_on_from(run_pass, step, lines)
        number, checksum = self._numbers[id(optimizer)], self._checksum.after(step)
        for place, group in enumerate(optimizer.param_groups):
            settings = settings_of(group)
            if settings != self._settings:
                self._settings = settings
            lines.steps.append(GroupStep(step, number, place, self._settings, self._gradient, checksum))
        if not self.log.broken and self._groups != self._group_sizes():
            self._revise(lines, broken=REGROUPED.format(step=step))
        self._keep_state(step, pending)

    def _go_on_from(self, run_pass: RunPass, step: int, lines: RunLogLines) -> None:
        """Note the state of the generator where it is not that after the pass before, and modes that have changed."""
        calls = run_pass.calls
        spans = [call.generators for call in calls if call.generators is not None]
        if not spans:
            return
        begin, end = spans[0][0], spans[-1][1]
        if self._end is None or not torch.equal(begin, self._end):
            run_pass.batch.generator = begin
        self._end = end
        last = self.log.modes[-1] if self.log.modes else Modes(0, (), ())
        if calls[0].modes != (last.evaluating, last.without_gradient):
            if len(self.log.modes) < MOST_MODES:
                self._revise(lines, modes=(*self.log.modes, Modes(step, *calls[0].modes)))
            elif not self.log.broken:
                self._revise(lines, broken=RESTLESS.format(step=step))

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
        if self._state_bytes is None:
            self._state_bytes = bytes_of_tensors(self._state(copy=False).values())
            self._schedule = self._make_schedule(self._state_bytes)
        again = step in self._schedule.kept[-1:]
        if not again and not self._schedule.due(step):
            return
        pending.log.states[step] = state = self._state()
        pending.kept += bytes_of_tensors(state.values())
        for dropped in () if again else self._schedule.add(step):
            pending.log.dropped.add(dropped)
            pending.kept -= bytes_of_tensors(pending.log.states.pop(dropped, {}).values())

    def keep_first_state(self, pending: PendingShard) -> None:
        """Keep the state before the first step if an optimiser begins with one (a loaded momentum)."""
        if any(optimizer.state for optimizer in self.optimizers):
            pending.log.states[0] = self._state()

    def announcement(self) -> str:
        """What is kept, in a sentence; known after the first step."""
        size, most = self._state_bytes or 0, self._schedule.most
        if not most:
            return (
                f"the run can be run again from its first step only: a whole state takes {in_bytes(size)}, more than "
                "replay= allows."
            )
        return (
            f"the run can be run again: of its whole states, {in_bytes(size)} each, at most {most} are kept at equal "
            f"distances, {in_bytes(most * size)} in all."
        )

    def _make_schedule(self, size: int) -> StateSchedule:
        most = STATES if self._budget is None else self._budget // max(1, size)
        return StateSchedule(most, tuple(state.step for state in self.log.states if state.step), size)

    def _state(self, copy: bool = True) -> dict[str, Tensor]:
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
        return state_of(tensors, states, torch.get_rng_state() if self._end is None else self._end, copy=copy)
