"""How what is found of a head is found: separations of what it selects, and of what random matrices do."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import QueryError

from ..separation import Separation, TwoParts, fit, fit_generalised, inside
from .alignment import Null, align, cosine_of, efficiency, random_like, untied
from .head_findings import HeadReport, HeadReportOptions, Optimality
from .head_inputs import SingleHeadInputs
from .saturation import saturation


def examine(
    sight: SingleHeadInputs,
    options: HeadReportOptions,
    chance: Null,
    start: SingleHeadInputs | None,
    items: Int[Tensor, "b m"] | None,
) -> HeadReport:
    """Everything about one head. ``chance`` is what random matrices do, ``start`` the head before training."""
    logits = sight.logits()
    if bool(logits.isnan().any()):
        raise QueryError(f"what head {sight.head} sees, or its weights, hold NaN or infinity: it selects nothing.")
    clear = untied(logits)
    if not len(clear):
        raise QueryError(f"in head {sight.head} all queries have several best tokens alike: nothing is selected.")
    tied, sight, logits = len(logits) - len(clear), sight.at(clear), logits[clear]
    weights = logits.softmax(1)
    found = separate(sight, logits, options)
    low = separate(sight, logits, options, nuclear=True, begin=found) if options.nuclear and found.feasible else None
    part = inside(found.problem, sight.W)
    begun = None if start is None or sight.space == "head" else start.W
    return HeadReport(
        sight, options, tied, saturation(weights, sight.hidden, options.selected, options.masked), found, low,
        _mixture(sight, weights, options), align(sight.W, found, part, begun),
        None if low is None else align(sight.W, low, part, begun), chance,
        None if sight.scores is None else _optimality(sight, found), items,
    )  # fmt: skip


def separate(
    sight: SingleHeadInputs, logits: Float[Tensor, "c m"], options: HeadReportOptions, *, nuclear: bool = False,
    begin: Separation | None = None,
) -> Separation:  # fmt: skip
    """The matrix that separates what some logits select."""
    return fit(
        sight.x, sight.z, logits.argmax(1), "nuclear" if nuclear else "frobenius", sequence=sight.sequence,
        hidden=sight.hidden, working=WORKING, logits=logits.masked_fill(sight.hidden, logits[~sight.hidden].min()),
        tolerance=max(options.tolerance, LEAST_NUCLEAR) if nuclear else options.tolerance, epochs=options.epochs,
        start=begin,
    )  # fmt: skip


WORKING, LEAST_NUCLEAR = 16, 1e-3
"""Tokens of a query to begin with, those of the largest logits; and the least tolerance for the nuclear norm."""


def null(sight: SingleHeadInputs, options: HeadReportOptions, rank: int, sharpest: int | None = None) -> Null:
    """Random matrices of the rank that heads of this shape have, at what they select themselves, on the same inputs.

    Where a head is looked at where it is sharp, so are they: of all queries each at so many that it is ``sharpest`` in.
    """
    cosines, efficiencies = [], []
    for number in range(options.null):
        W = random_like(sight.W, rank, options.seed + number)
        logits = sight.logits(W * (sight.W.norm() / W.norm()))
        clear = untied(logits)
        if sharpest is not None:
            clear = clear[logits[clear].softmax(1).amax(1).topk(min(sharpest, len(clear))).indices]
        found = separate(sight.at(clear), logits[clear], options) if len(clear) else None
        if found is not None and found.feasible:
            cosines.append(cosine_of(W, found.W))
            efficiencies.append(efficiency(W, found).high)
    made = (torch.tensor(each, dtype=torch.float64) for each in (cosines, efficiencies))
    return Null(*made, left_out=options.null - len(cosines))


def _mixture(sight: SingleHeadInputs, weights: Float[Tensor, "c m"], options: HeadReportOptions) -> TwoParts | None:
    """Where queries select several tokens: the direction that masks the others, and the part that mixes them."""
    several = bool(((weights >= options.selected).sum(1) > 1).any())
    if not options.mixtures or not several:
        return None
    return fit_generalised(
        sight.x, sight.z, weights, selected=options.selected, masked=options.masked, sequence=sight.sequence,
        hidden=sight.hidden, tolerance=options.tolerance, epochs=options.epochs,
    )  # fmt: skip


def _optimality(sight: SingleHeadInputs, found: Separation) -> Optimality | None:
    """Selected tokens beside those that hold the margin up, by what a loss thinks of them."""
    if sight.scores is None or not found.feasible:
        return None
    scores = sight.scores.masked_fill(sight.hidden, -torch.inf)
    own = scores.gather(1, found.problem.chosen.unsqueeze(1))
    better = (scores > own) & found.support
    return Optimality(
        int(better.sum()), int(better.any(1).sum()), float((own.squeeze(1) >= scores.amax(1)).double().mean())
    )
