r"""The linear datamodeling score: do scores rank what training without some examples gives?

For random subsets S of the training set, the network is really trained again on S alone. Scores predict a target by
their sum over S, and

.. math:: \mathrm{LDS}(q) =
    \mathrm{Spearman}_S\Big(\sum_{i \in S} \mathrm{score}_{qi},\; \varphi_q(\theta^\star(S))\Big)

(Ilyas et al. 2022, arXiv 2202.00622; Park et al. 2023, arXiv 2303.14186). A score is signed like a contribution:
positive where the example speaks for the target.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError
from dualform.replay import Retrain

from .ranks import spearman


@dataclass(frozen=True)
class RemovalRuns:
    """Trainings with some examples left out: the weight of each example, and the targets that came out."""

    weights: Float[Tensor, "runs examples"]
    values: Float[Tensor, "runs queries"]


@dataclass(frozen=True)
class Correlation:
    """A rank correlation of each query, their mean, and a 95 % interval of that mean by bootstrap over the queries."""

    mean: float
    low: float
    high: float
    per_query: Float[Tensor, " queries"]

    def __str__(self) -> str:
        return f"{self.mean:.3f} (95 % interval {self.low:.3f} to {self.high:.3f}, {len(self.per_query)} queries)"


def removal_runs(
    retrain: Retrain,
    examples: int,
    drop: float = 0.1,
    runs: int = 100,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> RemovalRuns:
    """Train ``runs`` times without a random share ``drop`` of the examples."""
    left_out = round(examples * drop)
    if not 0 < left_out < examples:
        raise QueryError(
            f"drop={drop} of {examples} examples leaves out {left_out}; it must be at least one, and not all of them."
        )
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(runs, examples)
    values = []
    for run, line in enumerate(weights):
        line[torch.randperm(examples, generator=generator)[:left_out]] = 0.0
        values.append(retrain(line))
        if progress is not None:
            progress(run + 1)
    return RemovalRuns(weights, torch.stack(values))


def lds(scores: Float[Tensor, "queries examples"], runs: RemovalRuns, seed: int = 0) -> Correlation:
    """The linear datamodeling score of scores of any origin."""
    queries, examples = runs.values.shape[1], runs.weights.shape[1]
    if tuple(scores.shape) != (queries, examples):
        raise QueryError(
            f"scores have shape {tuple(scores.shape)}, and the runs are about {queries} queries and {examples} "
            "examples: pass one line a query, with one number an example."
        )
    predicted = scores.double() @ runs.weights.double().mT
    return _with_interval(spearman(predicted, runs.values.mT), seed)


def leave_one_out(
    scores: Float[Tensor, " examples"], retrain: Retrain, query: int = 0, strongest: int = 20
) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
    """Predicted and real change of one target when each of the ``strongest`` examples is left out alone."""
    chosen = scores.abs().topk(min(strongest, len(scores))).indices
    whole = retrain(torch.ones(len(scores)))[query]
    changes = []
    for example in chosen:
        weights = torch.ones(len(scores))
        weights[example] = 0.0
        changes.append(retrain(weights)[query] - whole)
    return -scores[chosen], torch.stack(changes)


def _with_interval(per_query: Float[Tensor, " queries"], seed: int, samples: int = 1000) -> Correlation:
    kept = per_query[~per_query.isnan()]
    if not len(kept):
        return Correlation(float("nan"), float("nan"), float("nan"), per_query)
    drawn = torch.randint(len(kept), (samples, len(kept)), generator=torch.Generator().manual_seed(seed))
    low, high = kept[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=kept.dtype))
    return Correlation(float(kept.mean()), float(low), float(high), per_query)
