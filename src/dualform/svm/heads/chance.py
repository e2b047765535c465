"""The computation of a head's report: the separation of its selections, and those of random matrices."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import QueryError

from ..separation import Separation, TwoParts, fit, fit_generalised, project_to_span
from .alignment import Null, align, cosine_of, efficiency, random_like, untied_queries
from .head_findings import HeadReport, HeadReportOptions, Optimality
from .head_inputs import SingleHeadInputs
from .saturation import saturation


def report_on_head(
    inputs: SingleHeadInputs,
    options: HeadReportOptions,
    chance: Null,
    start: SingleHeadInputs | None,
    items: Int[Tensor, "b m"] | None,
) -> HeadReport:
    """The report on one head. ``chance`` has the results of random matrices, ``start`` the head before training."""
    logits = inputs.logits()
    if bool(logits.isnan().any()):
        raise QueryError(f"the inputs or the weights of head {inputs.head} hold NaN or infinity: it selects nothing.")
    clear = untied_queries(logits)
    if not len(clear):
        raise QueryError(f"in head {inputs.head} the best tokens of every query tie: nothing is selected.")
    tied, inputs, logits = len(logits) - len(clear), inputs.at(clear), logits[clear]
    weights = logits.softmax(1)
    separation = separate(inputs, logits, options)
    low = (
        separate(inputs, logits, options, nuclear=True, begin=separation)
        if options.nuclear and separation.feasible
        else None
    )
    part = project_to_span(separation.problem, inputs.W)
    begun = None if start is None or inputs.space == "head" else start.W
    return HeadReport(
        inputs, options, tied, saturation(weights, inputs.hidden, options.selected, options.masked), separation, low,
        _mixture(inputs, weights, options), align(inputs.W, separation, part, begun),
        None if low is None else align(inputs.W, low, part, begun), chance,
        None if inputs.scores is None else _optimality(inputs, separation), items,
    )  # fmt: skip


def separate(
    inputs: SingleHeadInputs, logits: Float[Tensor, "c m"], options: HeadReportOptions, *, nuclear: bool = False,
    begin: Separation | None = None,
) -> Separation:  # fmt: skip
    """Separate the token with the largest logit of each query from the others."""
    return fit(
        inputs.x, inputs.z, logits.argmax(1), "nuclear" if nuclear else "frobenius", sequence=inputs.sequence,
        hidden=inputs.hidden, working=WORKING, logits=logits.masked_fill(inputs.hidden, logits[~inputs.hidden].min()),
        tolerance=max(options.tolerance, NUCLEAR_TOLERANCE) if nuclear else options.tolerance, epochs=options.epochs,
        start=begin,
    )  # fmt: skip


WORKING, NUCLEAR_TOLERANCE = 16, 1e-3
"""Tokens per query in the first working set, and the smallest tolerance for the nuclear norm."""


def null_alignments(
    inputs: SingleHeadInputs, options: HeadReportOptions, rank: int, sharpest: int | None = None
) -> Null:
    """Random matrices of the rank of such heads, each separated at its own selections, on the same inputs.

    ``sharpest`` limits each to this many queries, those with its largest weights, to match a report on sharp queries.
    """
    cosines, efficiencies = [], []
    for number in range(options.null):
        W = random_like(inputs.W, rank, options.seed + number)
        logits = inputs.logits(W * (inputs.W.norm() / W.norm()))
        clear = untied_queries(logits)
        if sharpest is not None:
            clear = clear[logits[clear].softmax(1).amax(1).topk(min(sharpest, len(clear))).indices]
        separation = separate(inputs.at(clear), logits[clear], options) if len(clear) else None
        if separation is not None and separation.feasible:
            cosines.append(cosine_of(W, separation.W))
            efficiencies.append(efficiency(W, separation).high)
    tensors = (torch.tensor(numbers, dtype=torch.float64) for numbers in (cosines, efficiencies))
    return Null(*tensors, left_out=options.null - len(cosines))


def _mixture(inputs: SingleHeadInputs, weights: Float[Tensor, "c m"], options: HeadReportOptions) -> TwoParts | None:
    """The generalised separation, if it is asked for and some query selects several tokens."""
    several = bool(((weights >= options.selected).sum(1) > 1).any())
    if not options.mixtures or not several:
        return None
    return fit_generalised(
        inputs.x, inputs.z, weights, selected=options.selected, masked=options.masked, sequence=inputs.sequence,
        hidden=inputs.hidden, tolerance=options.tolerance, epochs=options.epochs,
    )  # fmt: skip


def _optimality(inputs: SingleHeadInputs, separation: Separation) -> Optimality | None:
    """Compare the first-order scores of selected tokens with those of their support tokens."""
    if inputs.scores is None or not separation.feasible:
        return None
    scores = inputs.scores.masked_fill(inputs.hidden, -torch.inf)
    own = scores.gather(1, separation.problem.chosen.unsqueeze(1))
    better = (scores > own) & separation.support
    return Optimality(
        int(better.sum()), int(better.any(1).sum()), float((own.squeeze(1) >= scores.amax(1)).double().mean())
    )
