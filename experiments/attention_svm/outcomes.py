"""E4: does training select the best tokens? A selection may also be only locally optimal, or not even that."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from rich.progress import track
from torch import Tensor

from dualform.svm import Separation
from dualform.svm.dynamics.gradient_descent import DescentSamples, cosine, descend, selected
from dualform.svm.dynamics.output_heads import LinearHead
from experiments.runs import console

from .settings import RATE, OutcomeSettings
from .trials import best, generator, linear_trials, matrices, scores, separations, share, spread_of, uniform


def measure(settings: OutcomeSettings) -> dict[str, Any]:
    """One row for each width."""
    about = f"n = {settings.n}"
    return {"widths": [row(settings, d) for d in track(settings.widths, about, console=console, transient=True)]}


def row(settings: OutcomeSettings, d: int) -> dict[str, Any]:
    """Train at one width, and sort the trials by what they select. Starts at zero see the same trials."""
    random = generator(settings.seed, settings.n, d)
    trials = settings.fewer if d >= 20 else settings.trials
    samples, head = linear_trials(random, trials, settings.n, settings.T, d)
    start = uniform(random, trials, d)
    start = start if settings.start == "uniform" else torch.zeros_like(start)
    W = descend(samples, head, start, settings.steps, rate=RATE).W
    chosen = selected(samples, W)
    found = separations(samples, chosen)
    all_best = (chosen == best(samples, head)).all(1)
    local = locally_optimal(samples, head, chosen, found)
    return {
        "d": d,
        "trials": trials,
        "global": share(all_best),
        "local": share(local & ~all_best),
        "not_local": share(~local & ~all_best),
        "locally_optimal": share(local),
        "feasible": share(torch.tensor([bool(each.feasible) for each in found])),
        "all_support": share(torch.tensor([all_support(each) for each in found])),
        "correlation": spread_of(cosine(W, matrices(found))),
    }


def locally_optimal(
    samples: DescentSamples, head: LinearHead, chosen: Int[Tensor, "r n"], found: Sequence[Separation]
) -> Bool[Tensor, " r"]:
    """Whether every selected token scores above its support tokens: the others are too far away to matter."""
    given = scores(samples, head)
    above = given.gather(-1, chosen.unsqueeze(-1)) > given  # r n T
    return torch.tensor(
        [bool(each.feasible) and bool(above[r][each.support].all()) for r, each in enumerate(found)]
    )  # fmt: skip


def all_support(found: Separation) -> bool:
    """Whether every token that is not selected holds the margin up."""
    return bool(found.feasible) and bool((found.support | found.problem.selected).all())
