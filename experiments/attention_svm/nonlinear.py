"""E6: a ReLU head likes mixtures of tokens, and W goes to a finite part that mixes and a direction that separates."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from dualform.svm import fit, fit_generalised
from dualform.svm.dynamics.gradient_descent import DescentSamples, WeightMatrices, descend, logits
from dualform.svm.dynamics.output_heads import ReluHead
from experiments.runs import console

from .released import descend_as_released
from .settings import RATE, NonlinearSettings
from .trials import TOLERANCE, generator, normal, signs, uniform, unit

SELECTED, MASKED, SATURATED = 1e-3, 1e-6, 1e-14
"""Attention weights from which a token counts as selected, up to which as masked, and below which as gone."""
OUTLIERS, FAR = 0.05, 0.02
"""The part of trials that a trimmed mean leaves out, and the 1 − correlation from which a formula does not fit."""


class Input(NamedTuple):
    """One input of a trial. ``floor``: late in training the head was at some time 0 on it, without a gradient."""

    tokens: int
    label: int
    floor: bool


class Trial(NamedTuple):
    """One accepted trial: 1 − correlation of W with each prediction; log₁₀ of the largest weight of a masked token."""

    formula: float
    direction: float
    token: float
    masked: float
    inputs: tuple[Input, ...]

    @property
    def floor(self) -> bool:
        """Whether some input was on the floor."""
        return any(each.floor for each in self.inputs)


def measure(settings: NonlinearSettings) -> dict[str, Any]:
    """Train batch after batch until enough trials are accepted, and say why the others were not."""
    found: list[Trial] = []
    fates: Counter[str] = Counter()
    for number in range(settings.most):
        for fate in batch(settings, generator(settings.seed, settings.d, number)):
            if len(found) < settings.accepted:
                fates[fate if isinstance(fate, str) else "accepted"] += 1
                found += [fate] if isinstance(fate, Trial) else []
        console.print(f"d = {settings.d}: {len(found)} of {fates.total()} accepted")
        if len(found) == settings.accepted:
            break
    saturated = [each for each in found if each.masked < math.log10(SATURATED)]
    inputs = [each for trial in found for each in trial.inputs]
    mixing, far = [each for each in inputs if each.tokens > 1], [each for each in found if each.formula > FAR]
    return {
        "d": settings.d,
        "tried": fates.total(),
        "fates": dict(fates),
        **{name: summary([getattr(each, name) for each in found]) for name in ("formula", "direction", "token")},
        "tokens": statistics.fmean(each.tokens for each in inputs) if inputs else None,
        "saturated": summary([each.formula for each in saturated]),
        "floor": summary([each.formula for each in found if each.floor]),
        "above": summary([each.formula for each in found if not each.floor]),
        "mixing": {
            "inputs": len(mixing),
            "floor": sum(each.floor for each in mixing),
            "floor_of_minus": sum(each.floor and each.label < 0 for each in mixing),
        },
        "single": {
            "inputs": len(inputs) - len(mixing),
            "floor": sum(each.floor for each in inputs if each.tokens == 1),
        },
        "far": {"trials": len(far), "floor": sum(each.floor for each in far)},
        "scatter": [[round(each.masked, 2), float(f"{each.formula:.3g}")] for each in found],
    }


def batch(settings: NonlinearSettings, random: Generator) -> list[Trial | str]:
    """What comes of every trial: a ``Trial``, or why it is left out."""
    samples, head, start = drawn(settings, random)
    kept = (samples.labels < 0).any(1)
    samples, head = DescentSamples(*(each[kept] for each in samples)), ReluHead(head.V[kept])
    late = range(3 * settings.steps // 4, settings.steps, 10)
    if settings.gradient == "stable":
        path = descend(samples, head, start[kept], settings.steps, rate=RATE, watch=late)
    else:
        path = descend_as_released(samples, head, start[kept], settings.steps, watch=late)
    log_weights = logits(samples, path.W).log_softmax(-1)
    floor, trained = torch.stack([on_the_floor(samples, head, W) for W in path.path]).any(0), iter(range(len(path.W)))
    return [
        judged(samples, path.W, log_weights, floor, next(trained)) if there else "no label −1"
        for there in kept.tolist()
    ]


def on_the_floor(samples: DescentSamples, head: ReluHead, W: WeightMatrices) -> Bool[Tensor, "r n"]:
    """Whether the head is 0 on an input: it cannot become less, and has no gradient there."""
    o = torch.einsum("rnt,rntd->rnd", logits(samples, W).softmax(-1), samples.tokens)
    return head.value(o) == 0


def drawn(settings: NonlinearSettings, random: Generator) -> tuple[DescentSamples, ReluHead, WeightMatrices]:
    """Unit tokens and queries, random labels, V square and of unit Frobenius norm, random weights to begin at."""
    r, n, T, d = settings.batch, settings.n, settings.T, settings.d
    samples = DescentSamples(unit(random, r, n, T, d), unit(random, r, n, d), signs(random, r, n))
    V = normal(random, r, d, d)
    return samples, ReluHead(V / torch.linalg.matrix_norm(V)[:, None, None]), uniform(random, r, d)


def judged(
    samples: DescentSamples, W: WeightMatrices, log_weights: Float[Tensor, "r n T"], floor: Bool[Tensor, "r n"], r: int
) -> Trial | str:
    """One trained trial, if it is clear which of its tokens are selected."""
    logs = log_weights[r]
    masked = logs <= math.log(MASKED)
    if bool((~masked & (logs < math.log(SELECTED))).any()):
        return "ambiguous"
    if not bool(masked.any()):
        return "finite"
    tokens, queries = samples.tokens[r], samples.queries[r]
    parts = fit_generalised(
        tokens, queries, logs.exp(), selected=SELECTED, masked=MASKED, tolerance=TOLERANCE["frobenius"]
    )
    single = fit(tokens, queries, logs.argmax(-1), tolerance=TOLERANCE["frobenius"])
    if not (parts.feasible and single.feasible):
        return "infeasible"
    about = (parts.selected.sum(1).tolist(), samples.labels[r].int().tolist(), floor[r].tolist())
    return Trial(
        apart(W[r], parts.predicted(W[r])), apart(W[r], parts.direction.W), apart(W[r], single.W),
        float(logs[masked].max()) / math.log(10), tuple(map(Input, *about)),
    )  # fmt: skip


def apart(a: Float[Tensor, "d d"], b: Float[Tensor, "d d"]) -> float:
    """1 − correlation."""
    return 1 - float((a * b).sum() / (a.norm() * b.norm()))


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Mean, median, and the mean without the largest 5 %: few trials with a large finite part make up the mean."""
    most = sorted(values)[: max(1, round((1 - OUTLIERS) * len(values)))]
    return {
        "trials": len(values),
        "mean": statistics.fmean(values) if values else None,
        "median": statistics.median(values) if values else None,
        "trimmed": statistics.fmean(most) if values else None,
    }
