r"""E7: a quadratic head on orthonormal tokens, where it is known beforehand how many tokens are mixed.

.. math:: h(o) = v^\top o - \lambda\|o\|^2 = \sum_t s_t g_t - \lambda\sum_t s_t^2,\qquad g_t = v^\top x_t

With orthonormal tokens the best weights s are the point of the simplex nearest to g/(2λ): none but the largest g have a
part in it, and the more the larger λ is.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from dualform.svm import fit, fit_generalised
from dualform.svm.dynamics.gradient_descent import DescentSamples, WeightMatrices, descend, logits
from dualform.svm.dynamics.output_heads import QuadraticHead

from .nonlinear import SELECTED, apart, summary
from .settings import QuadraticSettings
from .trials import TOLERANCE, generator, normal, share, unit

NEAR, FAR = 0.01, 0.1
"""How near all attention weights are to the best ones where training has come to them, and how far one is elsewhere."""


def measure(settings: QuadraticSettings) -> dict[str, Any]:
    """One row for each λ, all on the same trials."""
    return {"weights": [row(settings, weight) for weight in settings.weights]}


def row(settings: QuadraticSettings, weight: float) -> dict[str, Any]:
    """Train at one λ from zero, in stages of smaller and smaller steps; count tokens, hold W against the two parts."""
    samples, v = drawn(settings, generator(settings.seed, settings.n, settings.T, settings.d))
    W, head = torch.zeros(settings.trials, settings.d, settings.d, dtype=torch.float64), QuadraticHead(v, weight)
    for rate in settings.rates:
        W = descend(samples, head, W, settings.steps, rate=rate).W
    s = logits(samples, W).softmax(-1)
    ideal = best_weights(samples, v, weight)
    apart_most = (s - ideal).abs().amax((1, 2))
    return {
        "lambda": weight,
        "trials": settings.trials,
        "tokens": float((s >= SELECTED).sum(-1).double().mean()),
        "tokens_ideal": float((ideal > 0).sum(-1).double().mean()),
        "near": share(apart_most < NEAR),
        "far": share(apart_most > FAR),
        "weights_apart": float(apart_most.median()),
        **predictions(samples, W, ideal, apart_most < NEAR),
    }


def drawn(settings: QuadraticSettings, random: Generator) -> tuple[DescentSamples, Float[Tensor, "r d"]]:
    """Orthonormal tokens in each input, unit queries, labels +1, a unit v."""
    r, n, T, d = settings.trials, settings.n, settings.T, settings.d
    tokens = torch.linalg.qr(normal(random, r, n, d, T))[0].mT
    return DescentSamples(tokens, unit(random, r, n, d), torch.ones(r, n, dtype=torch.float64)), unit(random, r, d)


def best_weights(samples: DescentSamples, v: Float[Tensor, "r d"], weight: float) -> Float[Tensor, "r n T"]:
    """The attention that makes h largest: the point of the simplex nearest to g/(2λ), or the best token for λ = 0."""
    g = torch.einsum("rntd,rd->rnt", samples.tokens, v)
    if weight == 0:
        return torch.nn.functional.one_hot(g.argmax(-1), g.shape[-1]).double()
    return nearest_on_simplex(g / (2 * weight))


def nearest_on_simplex(y: Float[Tensor, "... T"]) -> Float[Tensor, "... T"]:
    r"""The s ≥ 0 of sum 1 that is nearest to y: :math:`s = (y - \tau)_+`, with the τ that makes the sum 1."""
    down = y.sort(-1, descending=True).values
    over = (down.cumsum(-1) - 1) / torch.arange(1, y.shape[-1] + 1, dtype=y.dtype)  # τ, if so many are above it
    count = (down > over).sum(-1, keepdim=True)
    return (y - over.gather(-1, count - 1)).clamp(min=0)


def predictions(
    samples: DescentSamples, W: WeightMatrices, ideal: Float[Tensor, "r n T"], near: Tensor
) -> dict[str, Any]:
    """1 − correlation of W with predictions made of the best weights alone, where training has come to them.

    Only the length R is taken from W. Where no token is masked W stays finite: the first part is all of it, and there
    is no direction; such trials are counted apart.
    """
    found: dict[str, list[float]] = {"formula": [], "direction": [], "token": [], "finite": []}
    infeasible = 0
    for r in near.nonzero().flatten().tolist():
        tokens, queries, tolerance = samples.tokens[r], samples.queries[r], TOLERANCE["frobenius"]
        tiny = math.ulp(0.0)  # a weight of the best ones is zero or not, there is nothing between
        parts = fit_generalised(tokens, queries, ideal[r], selected=tiny, masked=0.0, tolerance=tolerance)
        single = fit(tokens, queries, ideal[r].argmax(-1), tolerance=tolerance)
        if not (parts.feasible and single.feasible):
            infeasible += 1
        elif bool((ideal[r] > 0).all()):
            found["finite"].append(apart(W[r], parts.finite.W))
        else:
            for name, matrix in (
                ("formula", parts.predicted(W[r])),
                ("direction", parts.direction.W),
                ("token", single.W),
            ):
                found[name].append(apart(W[r], matrix))
    return {"infeasible": infeasible, **{name: summary(each) for name, each in found.items()}}
