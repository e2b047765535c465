"""A recorded training that can be run again: what would have changed, predicted and really trained.

There are three answers to "what if this example had not been there?", in rising order of trust and cost:

- *direct*: what the example put into the weights, with everything else held fixed,
- *through training*: its influence carried through every later step of this run, to first order,
- *retrained*: the network really trained again without it.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import HorizonError, QueryError, require
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
from .query import Target, choose, run_model

HELD = 1 << 29
"""Bytes of what the steps of one stretch read, held at a time while influence is carried back."""


@dataclass(frozen=True)
class RunCheck:
    """Whether a run came out as it was recorded: the first step that differs, and the parameters that do there."""

    steps: int
    first_difference: int | None
    parameters: tuple[str, ...]
    reason: str

    @property
    def exact(self) -> bool:
        return self.first_difference is None

    def __str__(self) -> str:
        if self.exact:
            return f"{self.steps} steps were run again, and every compared entry is the recorded one bit for bit."
        names = ", ".join(self.parameters[:4])
        return (
            f"The run differs from the recorded one from step {self.first_difference} of {self.steps} on (in {names}). "
            f"{self.reason}"
        )


@dataclass(frozen=True)
class Influence:
    """How a target depends on each example: positive where the example speaks for it.

    Leaving the example out of this run changes the target by about minus its value. ``values`` is (query, example), the
    columns in the order of ``index``.
    """

    kind: Literal["through training", "direct"]
    target: str
    index: np.ndarray
    values: Float[Tensor, "queries examples"]
    visits: pa.Table
    per_visit: Float[Tensor, "queries visits"]

    def __len__(self) -> int:
        return len(self.values)

    def top(self, k: int = 10, query: int = 0) -> list[tuple[Any, float]]:
        """The examples with the largest influence on a query, by their index, the strongest supporter first."""
        values, places = self.values[query].topk(min(k, len(self.index)))
        return [
            (self.index[place].item(), value) for place, value in zip(places.tolist(), values.tolist(), strict=True)
        ]

    def by(self, column: str) -> dict[Any, Float[Tensor, " queries"]]:
        """The influence of groups of visits: the values of a noted column."""
        if column not in self.visits.column_names:
            raise QueryError(f"no column {column!r}; the visits have {self.visits.column_names}.")
        names, groups = np.unique(self.visits[column].to_numpy(zero_copy_only=False), return_inverse=True)
        sums = self.per_visit.new_zeros(len(self), len(names)).index_add_(1, torch.from_numpy(groups), self.per_visit)
        return {name.item() if hasattr(name, "item") else name: sums[:, i] for i, name in enumerate(names)}

    def to_pandas(self) -> Any:
        """A table with one line for each query and example."""
        pandas = require("pandas", "pandas")
        queries, examples = self.values.shape
        return pandas.DataFrame(
            {
                "query": np.repeat(np.arange(queries), examples),
                "index": np.tile(self.index, queries),
                "influence": self.values.flatten().numpy(),
            }
        )

    def __str__(self) -> str:
        index, value = self.top(1)[0]
        change = "lower" if value > 0 else "higher"
        return (
            f"{self.kind}: without example {index} {self.target} of query 0 would be about {abs(value):.2g} {change}."
        )


@dataclass(frozen=True)
class Comparison:
    """The change of each query's target when some visits are left out, by each of the three answers."""

    target: str
    before: Float[Tensor, " queries"]
    direct: Float[Tensor, " queries"]
    predicted: Float[Tensor, " queries"]
    retrained: Float[Tensor, " queries"]

    def to_pandas(self) -> Any:
        pandas = require("pandas", "pandas")
        names = ("before", "direct", "predicted", "retrained")
        return pandas.DataFrame({name: getattr(self, name).numpy() for name in names})

    def __str__(self) -> str:
        lines = [f"Change of {self.target} (trust the last column):", "query   before   direct  predicted  retrained"]
        columns = (self.before, self.direct, self.predicted, self.retrained)
        for query, (before, *changes) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            lines.append(f"{query:5d} {before:8.3f} " + "  ".join(f"{change:+8.3f}" for change in changes))
        return "\n".join(lines)


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
        end = len(self._rerun.steps) if steps is None else steps
        if not 0 < end <= len(self._rerun.steps):
            raise HorizonError(f"cannot run {end} steps again: the memory holds {len(self._rerun.steps)}.")
        with self._untouched_generator():
            self._rerun.load(self._first)
            for step in range(1, end + 1):
                self._rerun.run(step)
                if names := differing(self.store, self._rerun.model, step):
                    return RunCheck(end, step, tuple(names), self._likely_reason(step))
        return RunCheck(end, None, (), "")

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
        with self._untouched_generator():
            self._rerun.weights = self._visit_weights(without, only, weights)
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
            before = function(self._trained)
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

    @cached_property
    def _trained(self) -> nn.Module:
        return self.retrain()

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
            return influences(self._rerun, function, self._states, direct=direct).values

    def _target(self, inputs: Any, target: Target) -> tuple[Callable[[nn.Module], Float[Tensor, " queries"]], str]:
        """The target as a function of a model. The predicted class is that of the trained network, whoever is asked."""
        with torch.no_grad(), outside_inference_mode():
            output = run_model(self._trained, inputs)
        examples = _count(inputs)
        values, name = choose(output, target, examples)
        if target is None:
            logits = output if isinstance(output, Tensor) else output.logits
            target = logits.reshape(len(values), -1, logits.shape[-1])[:, -1].argmax(1) if logits.ndim > 1 else None

        def function(model: nn.Module) -> Float[Tensor, " queries"]:
            return choose(run_model(model, inputs), target, examples)[0]

        return function, name

    @cached_property
    def _states(self) -> list[dict[str, Any]]:
        """States between which training runs again, so that what the steps of one stretch read fits into memory."""
        steps = len(self._rerun.steps)
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._rerun.model.state_dict().values())
        stretch = max(1, min(max(math.isqrt(steps), 1), HELD // max(1, 4 * size)))
        self._rerun.load(self._first)
        states = [self._first]
        for begin in range(stretch, steps, stretch):
            self._rerun.run(begin)
            states.append(self._rerun.state())
        return states

    @staticmethod
    @contextmanager
    def _untouched_generator() -> Iterator[None]:
        with outside_inference_mode(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            yield


def _count(inputs: Any) -> int:
    """The number of examples in some inputs: the length of the first tensor among them."""
    if isinstance(inputs, Tensor):
        return len(inputs)
    values = inputs.values() if hasattr(inputs, "values") else inputs
    return next(len(value) for value in values if isinstance(value, Tensor))
