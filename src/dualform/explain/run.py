"""A recorded training that can be run again: what would have changed, predicted and really trained.

There are three answers to "what if this example had not been there?", in rising order of trust and cost:

- *direct*: what the example put into the weights, with everything else held fixed,
- *through training*: its influence carried through every later step of this run, to first order,
- *retrained*: the network really trained again without it.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import DualformWarning, HorizonError, QueryError
from dualform.replay import (
    Data,
    Losses,
    MakeOptimizer,
    Rerun,
    Retrain,
    differing,
    influences,
    load_first_weights,
    ordered_names,
    rebuild_optimizers,
    step_traces,
)
from dualform.store import Store, outside_inference_mode

from .filters import Filter, matching
from .query import Target, choose, examples_first, first_axis, logits_of, run_model
from .run_answers import Comparison, Influence, RunCheck

HELD = 1 << 29
"""Bytes of what the steps of one stretch read, held at a time while influence is carried back."""


@dataclass(frozen=True)
class Reference:
    """The run as it was recorded: whether it came out so, states on the way, and the trained model."""

    check: RunCheck
    states: list[dict[str, Any]]
    trained: nn.Module


class ReplayedRun:
    """A recorded training, run again on a copy of the model. Made by ``memory.replay(model, losses, data)``."""

    def __init__(
        self,
        store: Store,
        model: nn.Module,
        losses: Losses,
        data: Data,
        *,
        index: str = "index",
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        store.need_steps()
        self.store, self.index_column = store, index
        copied = copy.deepcopy(model).train()
        load_first_weights(store, copied)
        traces = step_traces(store, ordered_names(store), index)
        self._rerun = Rerun(copied, rebuild_optimizers(store, copied, optimizer), losses, data, traces)
        self._first = self._rerun.state()

    def __repr__(self) -> str:
        return f"ReplayedRun({str(self.store.path)!r}, {len(self._rerun.steps)} steps)"

    # ------------------------------------------------------------------------------------------- run again

    def check(self, steps: int | None = None) -> RunCheck:
        """Run again from the first step (all of training, or ``steps`` of it), and compare with what was recorded."""
        if steps is None:
            return self._reference.check
        if not 0 < steps <= len(self._rerun.steps):
            raise HorizonError(f"cannot run {steps} steps again: the memory holds {len(self._rerun.steps)}.")
        with self._untouched_generator():
            self._rerun.load(self._first)
            for step in range(1, steps + 1):
                self._rerun.run(step)
                if difference := self._difference(step):
                    return replace(difference, steps=steps)
        return RunCheck(steps, None, (), "")

    def _difference(self, step: int) -> RunCheck | None:
        names = differing(self.store, self._rerun.model, step)
        return RunCheck(len(self._rerun.steps), step, tuple(names), self._likely_reason(step)) if names else None

    @cached_property
    def _reference(self) -> Reference:
        """One run with all weights 1, which every other run and question goes back to."""
        steps, difference, states = len(self._rerun.steps), None, [self._first]
        with self._untouched_generator():
            self._rerun.load(self._first)
            for step in range(1, steps + 1):
                self._rerun.run(step)
                difference = difference or self._difference(step)
                if step % self._stretch == 0 and step < steps:
                    states.append(self._rerun.state())
            trained = copy.deepcopy(self._rerun.model).eval()
        return Reference(difference or RunCheck(steps, None, (), ""), states, trained)

    @cached_property
    def _stretch(self) -> int:
        """The steps between two kept states, so that what the steps of one stretch read fits into memory."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._rerun.model.state_dict().values())
        return max(1, min(math.isqrt(len(self._rerun.steps)), HELD // max(1, 4 * size)))

    @cached_property
    def _exact(self) -> Reference:
        """The reference run. Answers from a run that is not the recorded one come with a warning."""
        if not self._reference.check.exact:
            warnings.warn(f"{self._reference.check} Its answers are about this run.", DualformWarning, stacklevel=3)
        return self._reference

    def _likely_reason(self, step: int) -> str:
        random = [type(m).__name__ for m in self._rerun.model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
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

    def retrain(
        self, *, without: Filter | None = None, only: Filter | None = None, weights: Tensor | None = None
    ) -> nn.Module:
        """Train again with some visits at weight 0, same order and same normaliser, and give the trained model.

        ``weights`` gives each visit a weight of its own; without any argument training is only repeated.
        """
        trained, visit_weights = self._exact.trained, self._visit_weights(without, only, weights)
        if visit_weights is None:
            return copy.deepcopy(trained)
        with self._untouched_generator():
            self._rerun.weights = visit_weights
            try:
                self._rerun.load(self._first)
                self._rerun.run(len(self._rerun.steps))
            finally:
                self._rerun.weights = None
            return copy.deepcopy(self._rerun.model).eval()

    def _visit_weights(self, without: Filter | None, only: Filter | None, weights: Tensor | None) -> Tensor | None:
        if sum(choice is not None for choice in (without, only, weights)) > 1:
            raise QueryError("pass one of without=, only= and weights=.")
        if weights is not None:
            if weights.shape != (len(self.visits),):
                raise QueryError(
                    f"weights has shape {tuple(weights.shape)}; give one number for each of the "
                    f"{len(self.visits)} visits."
                )
            return weights
        if without is not None:
            return torch.from_numpy(~matching(self.visits, without)).double()
        return None if only is None else torch.from_numpy(matching(self.visits, only)).double()

    # ------------------------------------------------------------------------------------------- questions

    @property
    def visits(self) -> pa.Table:
        return self.store.visits

    def influence(self, inputs: Any, *, target: Target = None) -> Influence:
        """The influence of every training example on a target of each input, through all of training."""
        return self._influence(inputs, target, direct=False)

    def direct(self, inputs: Any, *, target: Target = None) -> Influence:
        """The direct contribution of every training example over all parameters, in the same units."""
        return self._influence(inputs, target, direct=True)

    def compare(
        self, inputs: Any, *, without: Filter | None = None, only: Filter | None = None, target: Target = None
    ) -> Comparison:
        """What leaving out some visits changes: directly, predicted through training, and really retrained."""
        weights = self._visit_weights(without, only, None)
        if weights is None:
            raise QueryError("say what to leave out: compare(inputs, without='label = 3').")
        function, name = self._target(inputs, target)
        changes = [(self._per_visit(function, direct).double() @ (weights - 1.0)).float() for direct in (True, False)]
        with torch.no_grad():
            before = function(self._exact.trained)
            after = function(self.retrain(weights=weights))
        return Comparison(name, before, changes[0], changes[1], after - before)

    def retraining(self, inputs: Any, *, target: Target = None) -> Retrain:
        """For :mod:`dualform.evaluate`: a function that trains again with a weight for each *example* (in the order of
        :attr:`examples`) and gives the targets of ``inputs``.
        """
        function, _ = self._target(inputs, target)

        def values(weights: Float[Tensor, " examples"]) -> Float[Tensor, " queries"]:
            with torch.no_grad():
                return function(self.retrain(weights=weights[self._example_of_visit])).detach()

        return values

    @cached_property
    def examples(self) -> np.ndarray:
        """The index of every training example, in the order of the columns of ``Influence.values``."""
        return np.unique(self.visits[self.index_column].to_numpy())

    @cached_property
    def _example_of_visit(self) -> Tensor:
        return torch.from_numpy(np.searchsorted(self.examples, self.visits[self.index_column].to_numpy()))

    def _influence(self, inputs: Any, target: Target, direct: bool) -> Influence:
        function, name = self._target(inputs, target)
        per_visit = self._per_visit(function, direct)
        values = per_visit.new_zeros(len(per_visit), len(self.examples))
        values.index_add_(1, self._example_of_visit, per_visit)
        kind = "direct" if direct else "through training"
        return Influence(kind, name, self.examples, values, self.visits, per_visit)

    def _per_visit(
        self, function: Callable[[nn.Module], Float[Tensor, " queries"]], direct: bool
    ) -> Float[Tensor, "queries visits"]:
        with self._untouched_generator():
            return influences(self._rerun, function, self._exact.states, direct=direct).values

    def _target(self, inputs: Any, target: Target) -> tuple[Callable[[nn.Module], Float[Tensor, " queries"]], str]:
        """The target as a function of a model. The predicted class is that of the trained network, whoever is asked."""
        with torch.no_grad(), outside_inference_mode():
            output = run_model(self._exact.trained, inputs)
        examples = first_axis(inputs)
        _, name = choose(output, target, examples)
        if target is None:
            target = examples_first(logits_of(output), {}).argmax(1)

        def function(model: nn.Module) -> Float[Tensor, " queries"]:
            return choose(run_model(model, inputs), target, examples)[0]

        return function, name

    @staticmethod
    @contextmanager
    def _untouched_generator() -> Iterator[None]:
        with outside_inference_mode(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            yield
