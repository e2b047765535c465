"""The backward passes of a loop of which no slots are kept: which batches put something into the gradients of a step.

A hook on the outputs of each call that the loop makes is told when a backward pass reaches them. A pass counts if it
changed a gradient; when gradients were zeroed before it, the passes of earlier batches are forgotten, since no step
has used them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from ..hooks import Interrupts, uncompiled
from ..slots import Batch, BatchColumns, ModelCall


class RunPass(NamedTuple):
    """A backward pass of a run: its batch, and the user's calls of the model that it went through, in their order."""

    batch: Batch
    calls: list[ModelCall]


class PassWatch:
    """Collects the passes whose gradients the next step will use."""

    def __init__(
        self, optimizers: Sequence[optim.Optimizer], notes: BatchColumns, interrupts: Interrupts
    ) -> None:  # fmt: skip
        self._optimizers, self._notes, self._interrupts = optimizers, notes, interrupts
        self.passes: list[RunPass] = []
        """The passes of the next step, in their order."""
        self.backwards = 0
        """The backward passes that added to gradients."""
        self._under_way: dict[int, dict[int, tuple[Batch, ModelCall]]] = {}

    def called(self, call: ModelCall, output: Any) -> None:
        """The loop has called the model or a part of it."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._reached, self._notes.batch, call))

    @uncompiled
    def _reached(self, batch: Batch, call: ModelCall, errors: tuple[Tensor | None, ...]) -> None:
        task = torch._C._current_graph_task_id()
        calls = self._under_way.get(task)
        if calls is None:
            calls = self._under_way[task] = {}
            are_zeroed = bool(self.passes) and not any(bool(gradient.any()) for gradient in self._gradients())
            ended = self._interrupts.around(partial(self._ended, task, self._versions(), are_zeroed))
            torch.autograd.Variable._execution_engine.queue_callback(ended)
        calls[call.number] = batch, call

    @uncompiled
    def _ended(self, task: int, versions_before: list[tuple[int, int]], were_zeroed: bool) -> None:
        calls = self._under_way.pop(task)
        if self._versions() == versions_before:
            return
        self.backwards += 1
        if were_zeroed:
            self.passes = []
        for _, (batch, call) in sorted(calls.items()):
            arrived = self._notes.arrived(batch)
            calls_before = next((run_pass.calls for run_pass in self.passes if run_pass.batch is arrived), None)
            if calls_before is None:
                self.passes.append(RunPass(arrived, [call]))
            elif call not in calls_before:
                calls_before.append(call)

    def _versions(self) -> list[tuple[int, int]]:
        """Which tensors the gradients are, and how often each was written to."""
        return [(id(gradient), gradient._version) for gradient in self._gradients()]

    def _gradients(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if (gradient := parameter.grad) is not None:
                        yield gradient


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in the output of a call, in nested containers too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
