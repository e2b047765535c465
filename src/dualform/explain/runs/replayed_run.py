"""A recorded training that can be run again: what would have changed, predicted and really trained.

There are three answers to "what if this example had not been there?", in rising order of trust and cost:

- *direct*: what the example put into the weights, with everything else held fixed,
- *through training*: its influence carried through every later step of this run, to first order,
- *retrained*: the network really trained again without it.
"""

import copy
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import QueryError
from dualform.replay import (
    Data,
    Losses,
    MakeOptimizer,
    Rerun,
    Retrain,
    influences,
    load_first_weights,
    rebuild_optimizers,
    step_traces,
)
from dualform.store import Store, outside_inference_mode

from ..filters import Filter, matching
from ..query import Target, choose, examples_first, first_axis, logits_of, run_model
from .answers import Comparison, Influence, RunCheck
from .reference import ReferenceRun, untouched_generator


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
        store.need_training()
        self.store, self.index_column = store, index
        copied = copy.deepcopy(model).train()
        load_first_weights(store, copied)
        traces = step_traces(store, index)
        rerun = Rerun(copied, rebuild_optimizers(store, copied, optimizer), losses, data, traces)
        self._reference = ReferenceRun(store, rerun)

    def __repr__(self) -> str:
        return f"ReplayedRun({str(self.store.path)!r}, {len(self._reference.rerun.steps)} steps)"

    # ------------------------------------------------------------------------------------------- run again

    def check(self, steps: int | None = None, *, after: int = 0) -> RunCheck:
        """Run again from the first step (all of training, or ``steps`` of it), and compare with what was recorded.

        With ``after`` the stretch that follows this step, from the last whole state that was kept before it.
        """
        return self._reference.check(steps, after)

    def at(self, step: int) -> nn.Module:
        """The model as it was after a step."""
        return self._reference.at(step)

    def retrain(
        self, *, without: Filter | None = None, only: Filter | None = None, weights: Tensor | None = None
    ) -> nn.Module:
        """Train again with some visits at weight 0, same order and same normaliser, and give the trained model.

        ``weights`` gives each visit a weight of its own; without any argument training is only repeated.
        """
        trained, visit_weights = self._reference.exact.trained, self._visit_weights(without, only, weights)
        if visit_weights is None:
            return copy.deepcopy(trained)
        rerun = self._reference.rerun
        with untouched_generator():
            rerun.weights = visit_weights
            try:
                rerun.load(self._reference.first)
                rerun.run(len(rerun.steps))
            finally:
                rerun.weights = None
            return copy.deepcopy(rerun.model).eval()

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
            before = function(self._reference.exact.trained)
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
        with untouched_generator():
            return influences(self._reference.rerun, function, self._reference.exact.states, direct=direct).values

    def _target(self, inputs: Any, target: Target) -> tuple[Callable[[nn.Module], Float[Tensor, " queries"]], str]:
        """The target as a function of a model. The predicted class is that of the trained network, whoever is asked."""
        with torch.no_grad(), outside_inference_mode():
            output = run_model(self._reference.exact.trained, inputs)
        examples = first_axis(inputs)
        _, name = choose(output, target, examples)
        if target is None:
            target = examples_first(logits_of(output), {}).argmax(1)

        def function(model: nn.Module) -> Float[Tensor, " queries"]:
            return choose(run_model(model, inputs), target, examples)[0]

        return function, name
