"""A report in words: a table of heads, and what may be read from each."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from .head_findings import HeadReport

COLUMNS = (
    "head", "saturated", "entropy", "margin", "efficiency", "null", "cosine", "null", "nuclear", "rank", "support",
    "gap",
)  # fmt: skip
"""Of the table. The first null is that of efficiencies, the second of cosines."""

LEGEND = """saturated: queries with more than 0.99 of their weight on one token. margin: the smallest by which a
selected token scores above another. efficiency: margin per norm, beside the largest there is. cosine: with the matrix
that separates best; null: the same for random matrices at what they select. nuclear: cosine in the nuclear norm. rank:
of the head, of the separating matrix, of that in the nuclear norm. support: tokens that hold the margin up."""


def cells(head: HeadReport) -> list[str]:
    """One line of the table."""
    found, low, spectra = head.found, head.low, head.spectra
    ranks = [str(spectra[name].rank) for name in ("own", "frobenius", "nuclear") if name in spectra]
    least, most = head.null.range
    return [
        str(head.head),
        f"{100 * head.saturation.above[1]:.0f} %",
        f"{head.saturation.entropy:.2f}",
        f"{float(head.margins[0]):.2g}",
        "–" if found is None else str(found.efficiency),
        "–" if math.isnan(head.null.efficiency) else f"{head.null.efficiency:.2g}",
        "–" if found is None else f"{found.cosine:.3f}",
        "–" if math.isnan(least) else f"{least:.2f}–{most:.2f}",
        "–" if low is None else f"{low.cosine:.3f}",
        " / ".join(ranks),
        "–" if found is None else str(int(head.separation.support.sum())),
        {True: f"{head.separation.gap:.0e}", False: "infeasible", None: "not found"}[head.separation.feasible],
    ]


def sentences(head: HeadReport) -> list[str]:
    """What may be read from a head, and what may not."""
    said, found = [_saturation(head)], head.found
    if head.separation.feasible is False:
        return [*said, f"No matrix separates what it selects: {head.separation.certificate}."]
    if found is None:
        return [*said, f"What separates it was not found in {head.separation.epochs} epochs: allow more with epochs=."]
    least, most = head.null.range
    if math.isnan(least):
        said.append(
            f"Its cosine with the separating matrix is {found.cosine:.3f}; no random matrix was held beside it."
        )
    else:
        where = "above" if found.cosine > most else "below" if found.cosine < least else "within"
        said.append(
            f"Its cosine with the separating matrix, {found.cosine:.3f}, is {where} that of random matrices at what "
            f"they select ({least:.3f} to {most:.3f})."
        )
    said.append(
        f"Its smallest margin is {100 * found.efficiency.high:.2g} % of the largest for a matrix of its norm"
        + ("." if math.isnan(least) else f"; for random matrices it is {100 * head.null.efficiency:.2g} %.")
    )
    if head.optimality is not None:
        said.append(
            f"By first-order scores {100 * head.optimality.at_best:.0f} % of the queries select the token that lowers "
            f"the loss most; {head.optimality.better} support tokens would be better than the selected one."
        )
    if head.null.left_out:
        said.append(f"Of {head.null.left_out} random matrices more no separation was found in time.")
    if head.tied:
        said.append(f"{head.tied} queries more have several best tokens alike, and are left out.")
    if not head.separation.converged:
        said.append(f"The separating matrix is known to a gap of {head.separation.gap:.0e} only.")
    return said


def _saturation(head: HeadReport) -> str:
    s = head.saturation
    told = (
        f"{100 * s.above[1]:.0f} % of {len(head.selected)} queries put more than 0.99 of their weight on one token, "
        f"and {s.holding:.1f} tokens hold 95 % of it"
    )
    return f"{told}." if s.hard else f"{told}: attention this soft is not what the theory is about."


def as_table(rows: Sequence[Sequence[Any]]) -> str:
    """Columns that are as wide as what stands in them."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def heads_html(told: str, heads: Sequence[HeadReport]) -> str:
    """The table and the sentences, for a notebook."""
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(each))}</tr>" for each in heads)
    read = "".join(f"<li>Head {each.head}. {escape(' '.join(sentences(each)))}</li>" for each in heads)
    return f"<p>{escape(told)}</p><table><tr>{head}</tr>{body}</table><p><small>{LEGEND}</small></p><ul>{read}</ul>"
