"""E5: ranks of the separating matrices at the best tokens, solved accurately, and the way they were published."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.progress import track

from dualform.svm import Separation
from dualform.svm.dynamics.gradient_descent import DescentSamples
from experiments.runs import console

from .settings import RankSettings
from .trials import best, generator, linear_trials, separations, share, spread_of

CUT, ABSOLUTE = 1e-6, 1e-7
"""Singular values count from this part of the largest on; in the published way, from this number on, whatever the rest.

Our solvers leave zeros that are zero to rounding, so no larger part is needed: 1e-3 would miss small true values.
"""


def measure(settings: RankSettings) -> dict[str, Any]:
    """One row for each width."""
    about = f"n = {settings.n}, T = {settings.T}"
    return {"widths": [row(settings, d) for d in track(settings.widths, about, console=console, transient=True)]}


def row(settings: RankSettings, d: int) -> dict[str, Any]:
    """The same trials in both norms; the published way on the first of them, with the accurate rank of these beside."""
    random = generator(settings.seed, settings.n, settings.T, d)
    samples, head = linear_trials(random, settings.trials, settings.n, settings.T, d)
    chosen = best(samples, head)
    frobenius, nuclear = separations(samples, chosen), separations(samples, chosen, "nuclear")
    few = settings.published
    solved = [each for each in nuclear if each.feasible]
    return {
        "d": d,
        "trials": settings.trials,
        "feasible": share(torch.tensor([bool(each.feasible) for each in frobenius])),
        "undecided": sum(each.feasible is None for each in frobenius),
        "frobenius": ranks(frobenius),
        "nuclear": ranks(nuclear),
        "nuclear_worst_gap": max((each.gap for each in solved), default=None),
        "nuclear_unsolved": sum(not each.converged for each in solved),
        "published": {
            "trials": few,
            "nuclear": spread_of([published_rank(samples, chosen, trial) for trial in range(few)]),
            "accurate": ranks(nuclear[:few]),
            "infeasible": sum(not each.feasible for each in frobenius[:few]),
        },
    }


def ranks(found: Sequence[Separation]) -> dict[str, Any]:
    """Of those that have a solution: the others have no rank."""
    return spread_of([each.rank(CUT) for each in found if each.feasible])


def published_rank(samples: DescentSamples, chosen: Int[torch.Tensor, "r n"], trial: int) -> int:
    """What the released code counts: singular values of SCS's loose answer above 1e-7, and 1 where there is none."""
    W = by_scs(*(each[trial].numpy() for each in (samples.tokens, samples.queries, chosen)))
    return int(np.linalg.matrix_rank(W, tol=ABSOLUTE))  # of None it is 1


def by_scs(tokens: Float[np.ndarray, "n T d"], queries: Float[np.ndarray, "n d"], chosen: Int[np.ndarray, " n"]) -> Any:
    """The nuclear norm by cvxpy with SCS as it comes: a constraint for each pair, no tolerance; None if infeasible."""
    import cvxpy

    W = cvxpy.Variable((tokens.shape[-1],) * 2)
    above = [
        (tokens[i, at] - tokens[i, t]) @ W @ queries[i] >= 1
        for i, at in enumerate(chosen)
        for t in range(tokens.shape[1])
        if t != at
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a solution may be inaccurate is the point
        cvxpy.Problem(cvxpy.Minimize(cvxpy.norm(W, "nuc")), above).solve(solver=cvxpy.SCS)  # pyright: ignore[reportArgumentType]
    return W.value
