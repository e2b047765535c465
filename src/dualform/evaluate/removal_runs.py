"""Trainings with random subsets left out: the truth by which scores are judged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError
from dualform.replay import Retrain

Retrains = Retrain | Sequence[Retrain]
"""Trains again with weights of the examples; a list (of runs with several seeds) gives the mean of the outcomes."""


@dataclass(frozen=True)
class RemovalRuns:
    """Trainings with some examples left out: the weight of each example, and the targets that came out."""

    weights: Float[Tensor, "runs examples"]
    values: Float[Tensor, "runs queries"]

    def __len__(self) -> int:
        return len(self.weights)

    def __str__(self) -> str:
        left_out = float((self.weights == 0).double().mean())
        return (
            f"{len(self)} trainings without {left_out:.0%} of {self.weights.shape[1]:,} examples, and the targets of "
            f"{self.values.shape[1]} queries."
        )


def removal_runs(
    retrain: Retrains,
    examples: int,
    drop: float = 0.1,
    runs: int = 100,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> RemovalRuns:
    """Train ``runs`` times without a random share ``drop`` of the examples.

    With what ``run.retraining(…)`` gives they are trained in parallel processes, and kept in its folder; else one
    after the other, and ``progress`` is called with the number of those that are done.
    """
    left_out = round(examples * drop)
    if not 0 < left_out < examples:
        raise QueryError(
            f"drop={drop} of {examples} examples leaves out {left_out}; it must be at least one, and not all of them."
        )
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(runs, examples)
    for line in weights:
        line[torch.randperm(examples, generator=generator)[:left_out]] = 0.0
    return RemovalRuns(weights, train_each(retrain, weights, progress))


def train_each(
    retrain: Retrains, weights: Float[Tensor, "runs examples"], progress: Callable[[int], None] | None = None
) -> Float[Tensor, "runs queries"]:
    """The targets after each of several trainings: side by side where that is offered, else one after the other."""
    if isinstance(retrain, list | tuple):
        return torch.stack([train_each(part, weights, progress) for part in retrain]).mean(0)
    assert callable(retrain)
    many = getattr(retrain, "many", None)
    if many is not None and progress is None:
        return many(weights)
    values = []
    for run, line in enumerate(weights):
        values.append(retrain(line))
        if progress is not None:
            progress(run + 1)
    return torch.stack(values)


def average_runs(runs: Sequence[RemovalRuns]) -> RemovalRuns:
    """The same subsets, trained with several seeds: the mean of what came out."""
    if any(not torch.equal(part.weights, runs[0].weights) for part in runs):
        raise QueryError(
            "these runs left out other examples: runs that are averaged need the same subsets, that is the same "
            "examples, drop, number and seed in removal_runs."
        )
    return RemovalRuns(runs[0].weights, torch.stack([part.values for part in runs]).mean(0))


def without(order: Tensor, count: int, examples: int) -> Float[Tensor, " examples"]:
    """Weights that leave out the first ``count`` examples of an order."""
    weights = torch.ones(examples)
    weights[order[:count]] = 0.0
    return weights
