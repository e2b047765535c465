"""The text of a report: a table of heads, and sentences that interpret each head."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from .head_findings import HeadReport

COLUMNS = (
    "head", "saturated", "entropy", "margin", "efficiency", "null", "cosine", "null", "nuclear", "rank", "support",
    "gap",
)  # fmt: skip
"""The columns of the table. The first null belongs to the efficiencies, the second to the cosines."""

LEGEND = """saturated: queries with more than 0.99 of their weight on one token. margin: the smallest by which a
selected token scores above another. efficiency: margin per norm, relative to the largest possible. cosine: with the
matrix that separates best; null: the same for random matrices and their own selections. nuclear: cosine in the nuclear
norm. rank: of the head, of the separating matrix, of that in the nuclear norm. support: tokens that support the margin.
gap: how far the separating matrix may be from the optimum."""


def cells(head: HeadReport) -> list[str]:
    """One line of the table."""
    alignment, low, spectra = head.found, head.low, head.spectra
    ranks = [str(spectra[name].rank) for name in ("own", "frobenius", "nuclear") if name in spectra]
    least, most = head.null.range
    return [
        str(head.head),
        f"{100 * head.saturation.above[1]:.0f} %",
        f"{head.saturation.entropy:.2f}",
        f"{float(head.margins[0]):.2g}",
        "–" if alignment is None else str(alignment.efficiency),
        "–" if math.isnan(head.null.efficiency) else f"{head.null.efficiency:.2g}",
        "–" if alignment is None else f"{alignment.cosine:.3f}",
        "–" if math.isnan(least) else f"{least:.2f}–{most:.2f}",
        "–" if low is None else f"{low.cosine:.3f}",
        " / ".join(ranks),
        "–" if alignment is None else str(int(head.separation.support.sum())),
        {True: f"{head.separation.gap:.0e}", False: "infeasible", None: "not found"}[head.separation.feasible],
    ]


def is_separating(head: HeadReport) -> bool | None:
    """Whether a head is closer to the matrix that separates what it selects than every random matrix, with a larger
    margin for its norm; None if there is nothing to compare.
    """
    alignment, most = head.found, head.null.range[1]
    if alignment is None or math.isnan(most) or math.isnan(head.null.efficiency):
        return None
    return alignment.cosine > most and alignment.efficiency.high > head.null.efficiency


def verdict(head: HeadReport) -> str:
    """What a head's numbers come to, in one sentence."""
    soft = "" if head.saturation.hard else " Its attention is soft, which the theory is not about."
    if head.separation.feasible is False:
        return f"No matrix separates what it selects.{soft}"
    if head.found is None:
        return f"The matrix that separates what it selects was not found in time.{soft}"
    separating, cosine = is_separating(head), f"{head.found.cosine:.3f}"
    if separating is None:
        return f"Its cosine with the separating matrix is {cosine}; nothing to compare it with.{soft}"
    least, most = head.null.range
    if separating:
        margin, chance = f"{100 * head.found.efficiency.high:.2g} %", f"{100 * head.null.efficiency:.2g} %"
        return (
            f"It separates what it selects better than every random matrix: cosine {cosine} (theirs up to {most:.3f}),"
            f" margin {margin} of the largest (theirs {chance}).{soft}"
        )
    return f"It separates no better than random matrices: cosine {cosine}, theirs {least:.3f} to {most:.3f}.{soft}"


def sentences(head: HeadReport) -> list[str]:
    """What a head's numbers show, and what they do not."""
    lines, alignment = [_saturation_sentence(head)], head.found
    if head.separation.feasible is False:
        return [*lines, f"No matrix separates what it selects: {head.separation.certificate}."]
    if alignment is None:
        return [
            *lines,
            f"Its separating matrix was not found in {head.separation.epochs} epochs: allow more with epochs=.",
        ]
    least, most = head.null.range
    if math.isnan(least):
        lines.append(
            f"Its cosine with the separating matrix is {alignment.cosine:.3f}; no random matrices to compare it with."
        )
    else:
        where = "above" if alignment.cosine > most else "below" if alignment.cosine < least else "within"
        lines.append(
            f"Its cosine with the separating matrix, {alignment.cosine:.3f}, is {where} the range of random matrices "
            f"with their own selections ({least:.3f} to {most:.3f})."
        )
    lines.append(
        f"Its smallest margin is {100 * alignment.efficiency.high:.2g} % of the largest for a matrix of its norm"
        + ("." if math.isnan(least) else f"; for random matrices it is {100 * head.null.efficiency:.2g} %.")
    )
    if head.optimality is not None:
        lines.append(
            f"By first-order scores {100 * head.optimality.at_best:.0f} % of the queries select the token that lowers "
            f"the loss most; {head.optimality.better} support tokens would be better than the selected one."
        )
    if head.null.left_out:
        lines.append(f"For {head.null.left_out} more random matrices no separation was found in time.")
    if head.tied:
        lines.append(f"{head.tied} more queries are left out because their best tokens tie.")
    if not head.separation.converged:
        lines.append(f"The separating matrix is only known up to a gap of {head.separation.gap:.0e}.")
    return lines


def _saturation_sentence(head: HeadReport) -> str:
    s = head.saturation
    summary = (
        f"{100 * s.above[1]:.0f} % of {len(head.selected)} queries put more than 0.99 of their weight on one token, "
        f"and {s.holding:.1f} tokens hold 95 % of it"
    )
    return f"{summary}." if s.hard else f"{summary}: attention this soft is not what the theory is about."


def as_table(rows: Sequence[Sequence[Any]]) -> str:
    """A text table whose columns are as wide as their longest cell."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def heads_html(heading: str, heads: Sequence[HeadReport]) -> str:
    """The table and the sentences, for a notebook."""
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(head_report))}</tr>" for head_report in heads
    )
    read = "".join(
        f"<li>Head {head_report.head}. {escape(' '.join(sentences(head_report)))}</li>" for head_report in heads
    )
    return f"<p>{escape(heading)}</p><table><tr>{head}</tr>{body}</table><p><small>{LEGEND}</small></p><ul>{read}</ul>"
