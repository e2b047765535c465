"""The run with all weights 1: does it come out as it was recorded, which states lie on the way, what model comes out.

Every other run and every question of a :class:`~dualform.explain.ReplayedRun` goes back to it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import HorizonError, warn
from dualform.progress import OnProgress, Progress, bar
from dualform.replay import (
    Difference,
    PassTrace,
    Rerun,
    bytes_of_state,
    changed_values,
    copied,
    difference,
    has_state,
    kept_steps,
    loose_values,
    parameters_with_guessed_settings,
    untouched_generator,
)
from dualform.store import Store

from .answers import RunCheck

SHOWN = 4

WORTH_A_BAR = 200
"""Runs of fewer steps end before anyone could read the bar."""


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

    def __init__(self, store: Store, rerun: Rerun, budget: int, progress: Progress = True) -> None:
        self.store, self.rerun, self._budget, self.progress = store, rerun, budget, progress
        self.first = rerun.kept_state(0, store.state(0)) if has_state(store, 0) else rerun.state()

    def check(self, steps: int | None = None, after: int = 0) -> RunCheck:
        """Run again from the first step (all of training, or ``steps`` of it), and compare with what was recorded.

        With ``after`` the stretch that follows this step, from the last whole state that was kept before it.
        """
        end = len(self.rerun.steps) if steps is None else after + steps
        if steps is None and not after:
            return self._result.check
        if not 0 <= after < end <= len(self.rerun.steps):
            raise HorizonError(
                f"cannot run the steps {after + 1} to {end} again: the memory holds {len(self.rerun.steps)}."
            )
        with untouched_generator():
            begin = self._load_state_before(after)
            differences = Differences(begin + 1, end)
            for step in range(begin + 1, end + 1):
                self.rerun.run(step)
                differences.add(step, difference(self.store, self.rerun.model, step))
        return differences.check(self.likely_reason)

    def at(self, step: int) -> nn.Module:
        """The model after a step."""
        if not 0 <= step <= len(self.rerun.steps):
            raise HorizonError(f"cannot go to step {step}: the memory holds {len(self.rerun.steps)}.")
        with untouched_generator():
            states = [state for state in self.exact.states if state["position"] <= step]
            self.rerun.load(states[-1])
            self.rerun.run(step)
            return copied(self.rerun.model).eval()

    @cached_property
    def exact(self) -> ReferenceResult:
        """The result of the run. A run that is not the recorded one gives a warning."""
        if not self._result.check.exact:
            warn(f"{self._result.check} Its answers are about this run.")
        return self._result

    @cached_property
    def _result(self) -> ReferenceResult:
        result = self._run()
        return self._run() if self.rerun.doubts_clipping() else result

    def _run(self) -> ReferenceResult:
        steps, states = len(self.rerun.steps), KeptStates(self.first, self._budget, len(self.rerun.steps))
        differences, kept = Differences(1, steps), kept_steps(self.store)
        start = time.perf_counter()
        with untouched_generator(), self.bar("running training again") as watch:
            self.rerun.load(self.first)
            for step in range(1, steps + 1):
                self.rerun.run(step)
                if watch:
                    watch(1)
                unlike = difference(self.store, self.rerun.model, step)
                differences.add(step, unlike)
                corrected = unlike is not None and step in kept
                if corrected:  # from here on it is the recorded run again
                    self.rerun.load(self.rerun.kept_state(step, self.store.state(step)))
                if step < steps and states.wants(step, corrected):
                    states.add(self.rerun.state(), corrected)
            trained = copied(self.rerun.model).eval()
        check, seconds = differences.check(self.likely_reason), time.perf_counter() - start
        return ReferenceResult(check, states.states, trained, seconds, torch.get_num_threads())

    def bar(self, task: str, is_one_of_many: bool = False) -> AbstractContextManager[OnProgress | None]:
        """A bar for a run of all steps. A function of the user's counts the runs, where there may be many."""
        show = self.progress is True if is_one_of_many else self.progress
        return bar(task, len(self.rerun.steps), show, WORTH_A_BAR)

    def _load_state_before(self, step: int) -> int:
        """Go to the last whole state that was kept up to a step; returns its step."""
        kept = max((number for number in kept_steps(self.store) if number <= step), default=0)
        if kept:
            self.rerun.load(self.rerun.kept_state(kept, self.store.state(kept)))
        else:
            self.rerun.load(self.first)
        return kept

    def likely_reason(self, step: int) -> str:
        """Why a run may differ from the recorded one from a step on."""
        log, threads = self.store.manifest.run_log, torch.get_num_threads()
        random = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p for m in self.rerun.model.modules())
        if log is None and random:
            return (
                "The model draws random numbers (dropout), and this memory does not hold the state of the generator: a "
                "run with other random numbers is another run. Record with replay=True."
            )
        if log is not None and log.threads != threads:
            return (
                f"It was recorded with {log.threads} threads, and {threads} sum in another order: "
                f"torch.set_num_threads({log.threads}) before it is run again."
            )
        of_step = self.rerun.steps[step - 1].passes
        if not of_step:
            return (
                "No batch belongs to this step: the loop stepped again with the gradients of an earlier one, which is "
                "not run again yet."
            )
        if function := self._does_not_repeat(of_step[0]):
            return (
                f"`{function}` gives something else when it is called twice with the same arguments: it draws random "
                "numbers, or counts its calls. Make it a function of its arguments, with a seed for each example."
            )
        own = changed_values(self.first["loose"], loose_values(self.rerun.model))
        if own:
            return (
                f"The model itself changes {_quoted(own)} while it trains, which is in no state_dict and so in no "
                "memory: pass a model as it was before training, or register it as a buffer."
            )
        if step == 1:
            return f"It differs from the first step on: {self._about_losses()}{self._other_reasons_at_first()}"
        guessed = parameters_with_guessed_settings(self.store)
        guess = (
            f"The memory holds no settings of {_quoted(guessed)}, and those of another parameter of the same optimiser "
            "were taken: if it was in another group, record with replay=True. Else something"
        )
        return (
            f"The first steps agree, so the losses and the data are right as far as they were seen. "
            f"{guess if guessed else 'Something'} that the loop did beside its steps (an edit, clipping of single "
            f"entries or parameters{'' if log is not None else ', another mode of the model'}), an example that "
            "changed since, another machine"
            f"{'' if log is not None else f' or another number of threads ({threads} now)'} changes the numbers."
        )

    def _about_losses(self) -> str:
        factor = self.rerun.constant_factor()
        if factor is None:
            return "`losses` is not the loss of the loop (its shares must sum to what was backpropagated), "
        return (
            f"the gradients of the loop were {factor:.4g} times those of `losses`, at every step, so `losses` is "
            "probably not divided (by the batch size, the accumulated batches) as in the loop. Otherwise "
        )

    def _other_reasons_at_first(self) -> str:
        return (
            "`data` gives other inputs than the loop saw, the number of threads is another one "
            f"({torch.get_num_threads()} now), the optimiser has an option that is no number (fused, foreach: "
            "optimizer=dualform.tasks.optimizer_of(optimizer)), or the loop changed gradients otherwise than all of "
            "them by one factor (clipped by value, or some parameters)."
        )

    def _does_not_repeat(self, one_pass: PassTrace) -> str:
        """The name of a function of the user's that gives something else the second time; empty if both repeat."""
        batches, shares = [], []
        with untouched_generator(), torch.no_grad():
            for seed in (1, 2):
                torch.manual_seed(seed)  # a function that draws from torch's generator is none of its arguments either
                batches.append(self.rerun.batch(one_pass))
            for _ in (1, 2):
                torch.manual_seed(1)
                shares.append(self.rerun.losses(copied(self.rerun.model), batches[0]))
        return "data" if not _are_equal(*batches) else "" if _are_equal(*shares) else "losses"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _are_equal(one: Any, other: Any) -> bool:
    """Whether the tensors in two nested containers are equal; of other things nothing is said."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return True


class KeptStates:
    """States on the way, within a budget of bytes: √steps apart, and where that is too much every second one goes."""

    def __init__(self, first: dict[str, Any], budget: int, steps: int) -> None:
        self.states, self._needed = [first], {0}
        self._most = max(2, budget // max(1, bytes_of_state(first)))
        self._apart = max(1, math.isqrt(steps))

    def wants(self, step: int, corrected: bool) -> bool:
        """Whether to keep the state after a step. Where the run was ``corrected``, no other state leads there."""
        return corrected or step % self._apart == 0

    def add(self, state: dict[str, Any], corrected: bool) -> None:
        """Keep a state."""
        self.states.append(state)
        if corrected:
            self._needed.add(state["position"])
        while len(self.states) > max(self._most, len(self._needed)):
            self._apart *= 2
            self.states = [
                state for state in self.states
                if state["position"] in self._needed or state["position"] % self._apart == 0
            ]  # fmt: skip


@dataclass
class Differences:
    """Collects where a run differs from the recorded one."""

    first: int
    last: int
    first_difference: int | None = None
    shown: Difference | None = None

    def add(self, step: int, unlike: Difference | None) -> None:
        """A step was compared."""
        if unlike is None:
            return
        if self.first_difference is None:
            self.first_difference = step
        if self.shown is None and unlike.parameters:
            self.shown = unlike

    def check(self, reason: Callable[[int], str]) -> RunCheck:
        """The result, with the likely reason of the first difference."""
        if self.first_difference is None:
            return RunCheck(self.first, self.last)
        return RunCheck(self.first, self.last, self.first_difference, self.shown, reason(self.first_difference))
