"""E1 and E2: the paths of W and of K Qᵀ in the plane, and the rays of both separating matrices."""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from dualform.svm.dynamics.gradient_descent import (
    Descent,
    DescentSamples,
    KeyQueryFactors,
    WeightMatrices,
    cosine,
    descend,
    selected,
)
from dualform.svm.dynamics.output_heads import LinearHead

from .settings import RATE, PathSettings
from .trials import best, generator, matrices, normal, separations, share, spread_of, unit

POINTS = 80
"""Points of a path that are kept, close together where it bends."""
CLOSE, AT, APART = 0.99, math.cos(math.radians(4)), math.cos(math.radians(8))
"""W is close from this correlation on; a path is at its ray within 4 degrees, and rays are apart from 8 degrees on."""
OWN = {"W": "frobenius", "KQ": "nuclear"}


def measure(settings: PathSettings) -> dict[str, Any]:
    """Train all trials; count where those with a solution come to, and keep the path of the first that shows it."""
    random = generator(settings.seed, settings.T)
    samples, head = plane(random, settings)
    zero = torch.zeros(settings.trials, 2, 2, dtype=torch.float64)
    starts = {"W": zero, "KQ": KeyQueryFactors(0.1 * normal(random, settings.trials, 2, 2), zero)}
    watch = {round(1.5 * 1.1**k - 1.5) for k in range(POINTS)}
    watch = [step for step in watch if step <= settings.steps]
    found = {
        name: descend(
            samples, head, start, settings.steps, rate=RATE, watch=watch, decay=settings.decay if name == "KQ" else 0.0
        )
        for name, start in starts.items()
    }
    chosen = best(samples, head)
    ideals = {norm: matrices(separations(samples, chosen, norm)) for norm in ("frobenius", "nuclear")}
    shows = showing(settings, samples, chosen, found, ideals)
    drawn = int(shows.int().argmax())
    return {
        "feasible": share(~ideals["frobenius"].isnan().flatten(1).any(1)),
        "shows": share(shows),
        "drawn": {"trial": drawn, **picture(drawn, samples, chosen, found, ideals)} if bool(shows.any()) else None,
        "correlations": {name: correlations(name, samples, chosen, path.W, ideals) for name, path in found.items()},
    }


def plane(random: Generator, settings: PathSettings) -> tuple[DescentSamples, LinearHead]:
    """Token 0 on the right, the others on the left, labels +1. E1 puts token 0 at (1, ±0.5)."""
    tokens = (0.5 if settings.data == "apart" else 0.3) * normal(random, settings.trials, 2, settings.T, 2)
    tokens[:, :, 1:, 0] -= 1
    if settings.data == "apart":
        tokens[:, :, 0] = torch.tensor([[1, 0.5], [1, -0.5]], dtype=torch.float64)
    else:
        tokens[:, :, 0, 0] += 1
    labels = torch.ones(settings.trials, 2, dtype=torch.float64)
    return DescentSamples(tokens, unit(random, settings.trials, 2, 2), labels), LinearHead(
        unit(random, settings.trials, 2)
    )


def showing(
    settings: PathSettings,
    samples: DescentSamples,
    chosen: Tensor,
    found: dict[str, Descent],
    ideals: dict[str, WeightMatrices],
) -> Bool[Tensor, " r"]:
    """Trials to draw: token 0 is best and all paths come to their rays. In E1 the rays of both inputs are apart, in E2
    those of both norms.
    """
    rays = {norm: samples.queries @ ideal.mT for norm, ideal in ideals.items()}
    mask = (chosen == 0).all(1)
    for name, path in found.items():
        there = selected(samples, path.W) == chosen
        mask &= (there & (along(samples.queries @ path.W.mT, rays[OWN[name]]) > AT)).all(1)
    one, other = rays.values()
    pair = (one[:, :1], one[:, 1:]) if settings.data == "apart" else (one, other)
    return mask & (along(*pair) < APART).all(1)


def along(a: Float[Tensor, "r n 2"], b: Float[Tensor, "r n 2"]) -> Float[Tensor, "r n"]:
    """The cosine of the angle between two rays."""
    return torch.nn.functional.cosine_similarity(a, b, dim=-1)


def correlations(
    name: str, samples: DescentSamples, chosen: Tensor, W: WeightMatrices, ideals: dict[str, WeightMatrices]
) -> dict[str, Any]:
    """With both separating matrices, over the trials whose best tokens were found, and how many came close."""
    there, own = (selected(samples, W) == chosen).all(1), ideals[OWN[name]]
    close = cosine(W, own) > CLOSE
    short = there & ~close
    return {
        "found": share(there),
        "close": share(close[there]),
        "short": {"trials": int(short.sum()), "second": second(W[short]), "second_ideal": second(own[short])},
        **{norm: spread_of(cosine(W, ideal)[there]) for norm, ideal in ideals.items()},
    }


def second(W: WeightMatrices) -> float | None:
    """The second singular value as a part of the first, median over trials: how far W is from rank one."""
    singular = torch.linalg.svdvals(W)
    return float((singular[:, 1] / singular[:, 0]).median()) if len(W) else None


def picture(
    trial: int, samples: DescentSamples, chosen: Tensor, found: dict[str, Descent], ideals: dict[str, WeightMatrices]
) -> dict[str, Any]:
    """What the figure of one trial needs: tokens, both rays for each query, and the paths W(k) z."""

    def of(W: Float[Tensor, "2 2"]) -> list[Any]:
        return rounded(samples.queries[trial] @ W.mT)

    return {
        "tokens": rounded(samples.tokens[trial]),
        "chosen": chosen[trial].tolist(),
        "rays": {norm: of(ideal[trial]) for norm, ideal in ideals.items()},
        "paths": {name: [of(W[trial]) for W in path.path] for name, path in found.items()},
        "correlations": {
            name: {norm: float(cosine(path.W, ideal)[trial]) for norm, ideal in ideals.items()}
            for name, path in found.items()
        },
    }


def rounded(values: Tensor) -> list[Any]:
    """Short enough to be kept."""
    return (values * 1e4).round().div(1e4).tolist()
