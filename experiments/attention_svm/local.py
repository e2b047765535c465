"""E3: training W goes to the separating matrix of the Frobenius norm, training K and Q to that of the nuclear norm."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from dualform.svm.dynamics.gradient_descent import (
    DescentSamples,
    KeyQueryFactors,
    WeightMatrices,
    cosine,
    descend,
    logits,
    selected,
)
from dualform.svm.dynamics.output_heads import LinearHead

from .released import descend_as_released
from .settings import RATE, LocalSettings
from .trials import best, efficiency, generator, linear_trials, matrices, separations, share, spread_of, uniform

NORMS = ("frobenius", "nuclear")
CURVE = (
    *range(0, 20, 2),
    *range(20, 100, 10),
    *range(100, 400, 50),
    *range(400, 2000, 200),
    *range(2000, 20_001, 1000),
)
"""Steps of the curves."""


def measure(settings: LocalSettings) -> dict[str, Any]:
    """Train W, and K and Q, on the same trials. All variants of a seed share their trials and starts."""
    random = generator(settings.seed)
    samples, head = linear_trials(
        random, settings.trials, settings.n, settings.T, settings.d, self_attention=settings.attention == "self"
    )
    W, K, Q = (uniform(random, settings.trials, settings.d) for _ in range(3))
    return {
        name: trained(settings, samples, head, start) for name, start in (("W", W), ("KQ", KeyQueryFactors(K, Q)))
    }  # fmt: skip


def trained(
    settings: LocalSettings, samples: DescentSamples, head: LinearHead, start: WeightMatrices | KeyQueryFactors
) -> dict[str, Any]:
    """What is seen at the steps shown, each held against the tokens selected then; curves, against those at the end."""
    curve = [step for step in CURVE if step <= settings.steps]
    watch = (*curve, *settings.shown)
    if settings.gradient == "stable":
        path = descend(samples, head, start, settings.steps, rate=RATE, decay=settings.decay, watch=watch)
    else:
        path = descend_as_released(samples, head, start, settings.steps, watch=watch)
    at = dict(zip(path.steps, path.path, strict=True))
    end = [matrices(separations(samples, selected(samples, path.W), norm)) for norm in NORMS]
    return {
        "shown": {str(step): seen(samples, head, at[step]) for step in settings.shown},
        "curve": {
            "steps": curve,
            "softmax": [float(attended(samples, at[step]).mean()) for step in curve],
            **{
                norm: [float(cosine(at[step], ideal).nanmean()) for step in curve]
                for norm, ideal in zip(NORMS, end, strict=True)
            },
        },
    }


def seen(samples: DescentSamples, head: LinearHead, W: WeightMatrices) -> dict[str, Any]:
    """Correlations with both separating matrices at the tokens that W selects, and how good W's own margin is."""
    chosen = selected(samples, W)
    found = {norm: separations(samples, chosen, norm) for norm in NORMS}
    ideals = {norm: matrices(each) for norm, each in found.items()}
    return {
        **{norm: spread_of(cosine(W, ideal)) for norm, ideal in ideals.items()},
        "both": spread_of(cosine(*ideals.values())),
        **{f"efficiency_{norm}": spread_of(efficiency(samples, W, chosen, each)) for norm, each in found.items()},
        "softmax": spread_of(attended(samples, W)),
        "best": share((chosen == best(samples, head)).all(1)),
        "feasible": share(~ideals["frobenius"].isnan().flatten(1).any(1)),
        "worst_gap": max(each.gap for norm in NORMS for each in found[norm] if each.feasible),
    }


def attended(samples: DescentSamples, W: WeightMatrices) -> Float[Tensor, " r"]:
    """The largest attention weight of a sample, mean over the samples of each trial."""
    return logits(samples, W).softmax(-1).amax(-1).mean(1)
