"""Random trials, their best tokens, and the quantities that a trained W is compared with."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from dualform.svm import Separation, fit
from dualform.svm.dynamics.gradient_descent import DescentSamples, WeightMatrices, logits
from dualform.svm.dynamics.output_heads import LinearHead
from dualform.svm.separation.separation import Norm

TOLERANCE: dict[Norm, float] = {"frobenius": 1e-8, "nuclear": 1e-5}
"""Relative gaps to which separating matrices are solved."""


def generator(*seeds: int) -> Generator:
    """A separate random generator for each experiment, width and batch."""
    number = 0
    for seed in seeds:
        number = number * 100_003 + seed
    return Generator().manual_seed(number)


def normal(random: Generator, *shape: int) -> Tensor:
    """Gaussian numbers."""
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def unit(random: Generator, *shape: int) -> Tensor:
    """Gaussian vectors of length 1."""
    return torch.nn.functional.normalize(normal(random, *shape), dim=-1)


def signs(random: Generator, *shape: int) -> Tensor:
    """±1."""
    return torch.randint(2, shape, generator=random).double() * 2 - 1


def uniform(random: Generator, trials: int, d: int) -> WeightMatrices:
    """Initial weights, distributed as in a linear layer of torch."""
    return (2 * torch.rand(trials, d, d, generator=random, dtype=torch.float64) - 1) / math.sqrt(d)


def linear_trials(
    random: Generator, trials: int, n: int, T: int, d: int, *, self_attention: bool = False
) -> tuple[DescentSamples, LinearHead]:
    """Unit tokens and queries, random labels, a random unit head. In self-attention the first token is the query."""
    tokens, queries = unit(random, trials, n, T, d), unit(random, trials, n, d)
    samples = DescentSamples(tokens, tokens[:, :, 0] if self_attention else queries, signs(random, trials, n))
    return samples, LinearHead(unit(random, trials, d))


def scores(samples: DescentSamples, head: LinearHead) -> Float[Tensor, "r n T"]:
    """Scores γ = Y vᵀx of all tokens: the value of attending to one token alone."""
    return samples.labels.unsqueeze(-1) * torch.einsum("rntd,rd->rnt", samples.tokens, head.v)


def best(samples: DescentSamples, head: LinearHead) -> Int[Tensor, "r n"]:
    """The token with the largest score, for each input."""
    return scores(samples, head).argmax(-1)


def separations(samples: DescentSamples, chosen: Int[Tensor, "r n"], norm: Norm = "frobenius") -> list[Separation]:
    """The separating matrix for the chosen tokens of each trial."""
    return [
        fit(tokens, queries, each, norm, tolerance=TOLERANCE[norm])
        for tokens, queries, each in zip(samples.tokens, samples.queries, chosen, strict=True)
    ]


def matrices(found: Sequence[Separation]) -> WeightMatrices:
    """All separating matrices; NaN where there is none, so that no statistic uses it."""
    d = found[0].problem.tokens.shape[-1]
    none = torch.full((d, d), math.nan, dtype=torch.float64)
    return torch.stack([each.W if each.feasible else none for each in found])


def efficiency(
    samples: DescentSamples, W: WeightMatrices, chosen: Int[Tensor, "r n"], found: Sequence[Separation]
) -> Float[Tensor, " r"]:
    """The smallest margin of W relative to its norm, as a fraction of the largest possible: at most 1."""
    given, at = logits(samples, W), chosen.unsqueeze(-1)
    least = (given.gather(-1, at) - given).scatter(-1, at, math.inf).amin((1, 2))
    sizes = torch.linalg.matrix_norm(W, "fro" if found[0].norm == "frobenius" else "nuc")
    smallest = torch.tensor([each.upper if each.feasible else math.nan for each in found], dtype=torch.float64)
    return least / sizes * smallest


def spread_of(values: Tensor | Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation over the trials that have a value, and their number."""
    given = [float(value) for value in values if not math.isnan(float(value))]
    return {
        "mean": statistics.fmean(given) if given else None,
        "std": statistics.stdev(given) if len(given) > 1 else None,
        "trials": len(given),
    }


def share(mask: Tensor) -> float:
    """The share of trials."""
    return float(mask.double().mean())
