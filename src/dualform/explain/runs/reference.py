"""The run with all weights 1: does it come out as it was recorded, which states lie on the way, what model comes out.

Every other run and every question of a :class:`~dualform.explain.ReplayedRun` goes back to it.
"""

import copy
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from dualform.errors import DualformWarning, HorizonError
from dualform.replay import Rerun, differing
from dualform.store import Store, outside_inference_mode

from .answers import RunCheck

STRETCH_BYTES = 1 << 29
"""Bytes of what the steps of one stretch read, in memory at a time while influence is carried back."""


@dataclass(frozen=True)
class ReferenceResult:
    """What one run from the first step to the last gave."""

    check: RunCheck
    states: list[dict[str, Any]]
    trained: nn.Module
    seconds: float
    threads: int
    """The threads that torch used: another number of them rounds differently."""


class ReferenceRun:
    """The recorded run, made again once and remembered. ``rerun`` stands at the first step."""

    def __init__(self, store: Store, rerun: Rerun) -> None:
        self.store, self.rerun = store, rerun
        self.first = rerun.state()

    def check(self, steps: int | None = None) -> RunCheck:
        """Run again from the first step (all of training, or ``steps`` of it), and compare with what was recorded."""
        if steps is None:
            return self._result.check
        if not 0 < steps <= len(self.rerun.steps):
            raise HorizonError(f"cannot run {steps} steps again: the memory holds {len(self.rerun.steps)}.")
        with untouched_generator():
            self.rerun.load(self.first)
            for step in range(1, steps + 1):
                self.rerun.run(step)
                if difference := self._difference(step):
                    return replace(difference, steps=steps)
        return RunCheck(steps, None, (), "")

    @cached_property
    def exact(self) -> ReferenceResult:
        """The result of the run. A run that is not the recorded one gives a warning."""
        if not self._result.check.exact:
            warnings.warn(f"{self._result.check} Its answers are about this run.", DualformWarning, stacklevel=3)
        return self._result

    @cached_property
    def _result(self) -> ReferenceResult:
        steps, difference, states = len(self.rerun.steps), None, [self.first]
        start = time.perf_counter()
        with untouched_generator():
            self.rerun.load(self.first)
            for step in range(1, steps + 1):
                self.rerun.run(step)
                difference = difference or self._difference(step)
                if step % self._stretch == 0 and step < steps:
                    states.append(self.rerun.state())
            trained = copy.deepcopy(self.rerun.model).eval()
        check, seconds = difference or RunCheck(steps, None, (), ""), time.perf_counter() - start
        return ReferenceResult(check, states, trained, seconds, torch.get_num_threads())

    @cached_property
    def _stretch(self) -> int:
        """The steps between two kept states, so that what the steps of one stretch read fits into memory."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.rerun.model.state_dict().values())
        return max(1, min(math.isqrt(len(self.rerun.steps)), STRETCH_BYTES // max(1, 4 * size)))

    def _difference(self, step: int) -> RunCheck | None:
        names = differing(self.store, self.rerun.model, step)
        return RunCheck(len(self.rerun.steps), step, tuple(names), self._likely_reason(step)) if names else None

    def _likely_reason(self, step: int) -> str:
        random = [type(m).__name__ for m in self.rerun.model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        if any(random):
            return (
                "The model draws random numbers (dropout), and this memory does not hold the state of the generator: a "
                "run with other random numbers is another run."
            )
        if step == 1:
            return (
                "It differs from the first step on: `losses` is not the loss of the loop (its shares must sum to what "
                "was backpropagated), `data` gives other inputs than the loop saw, or the number of threads is "
                f"another one ({torch.get_num_threads()} now)."
            )
        return (
            "The first steps agree, so the losses and the data are right as far as they were seen; another number "
            f"of threads ({torch.get_num_threads()} now), or something that the loop did beside its steps (an edit, "
            "another mode of the model), changes the last bits."
        )


@contextmanager
def untouched_generator() -> Iterator[None]:
    """Run with gradients and with random numbers of one's own: the caller's generator stays where it is."""
    with outside_inference_mode(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        yield
