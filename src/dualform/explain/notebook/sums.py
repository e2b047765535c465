"""Sums over groups and over training time as people see them: bars and lines."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .markup import BLUE, GREEN, ORANGE, PURPLE, TOTAL, Markup, bars, card, joined, lines_over_time, table, tag
from .text import ends, plain, same_digits, spark, visible_text

if TYPE_CHECKING:
    from ..answers import Groups, Timeline

QUERIES, SHOWN, LINES = 8, 10, (BLUE, ORANGE, GREEN, PURPLE)
"""The most queries that are shown, groups from each end, and the colours of the strongest groups over time."""


def groups_html(groups: "Groups") -> str:
    """A bar for each group and for the other parts, and their sum."""
    parts = []
    for query in range(min(QUERIES, len(groups))):
        lines = _parts(groups, query)
        values = [value for _, value in lines]
        numbers = _numbers(groups, values)
        cells: list[Sequence[Any]] = [
            [name, picture, number] for (name, _), picture, number in zip(lines, bars(values), numbers, strict=True)
        ]
        if groups.total is not None:
            whole = float(groups.total[query])
            cells.append([TOTAL, "sum of all parts", "", same_digits([whole, *values])[0]])
        heads = [groups.column, "", _unit(groups)]
        parts.append(joined(_heading(len(groups), query), table(heads, cells, left=(0, 1))))
    return card(groups_heading(groups), *parts, notes=_notes(groups))


def groups_lines(groups: "Groups") -> Iterator[str]:
    """The sums as lines of text."""
    yield f"{groups_heading(groups)}:"
    for query in range(len(groups)):
        if len(groups) > 1:
            yield f"query {query}"
        lines = _parts(groups, query)
        numbers = _numbers(groups, [value for _, value in lines])
        width = max(map(len, numbers), default=0)
        yield from (f"  {number:>{width}}  {name}" for (name, _), number in zip(lines, numbers, strict=True))
        if groups.total is not None:
            whole = same_digits([float(groups.total[query]), *(value for _, value in lines)])[0]
            yield f"  {whole:>{width}}  sum of all parts"
    yield from _notes(groups)


def groups_heading(groups: "Groups") -> str:
    """What was summed, in words."""
    return f"{_sums(groups)} by {visible_text(groups.column)}, in {_place(groups.layer)}"


def timeline_html(line: "Timeline") -> str:
    """The strongest groups as lines over training."""
    begin, end = int(line.edges[0]), int(line.edges[-1])
    parts = [
        joined(_heading(len(line), query), lines_over_time(_strongest(line, query), begin, end))
        for query in range(min(QUERIES, len(line)))
    ]
    hidden = len(line.names) - len(LINES)
    more = f"{hidden} other groups are not drawn." if hidden > 0 else ""
    return card(timeline_heading(line), *parts, notes=(more, _more(len(line))))


def timeline_lines(line: "Timeline") -> Iterator[str]:
    """A row of blocks for each group; the middle of their height is 0."""
    yield f"{timeline_heading(line)}:"
    for query in range(len(line)):
        if len(line) > 1:
            yield f"query {query}"
        values = line.values[query]
        largest = float(values.abs().max()) if values.numel() else 0.0
        sums = same_digits(values.sum(1).tolist())
        for name, row, whole in zip(line.names, values.tolist(), sums, strict=True):
            yield f"  {spark(row, largest)}  {whole}  {_group(line, name)}"


def timeline_heading(line: "Timeline") -> str:
    """What was summed over time, in words."""
    by = f" by {visible_text(line.column)}" if line.column else ""
    begin, end, stretches = int(line.edges[0]), int(line.edges[-1]), line.values.shape[2]
    when = f"steps {begin + 1:,} to {end:,} in {stretches} stretches"
    return f"{_sums(line)}{by} over training ({when}), in {_place(line.layer)}"


def _parts(groups: "Groups", query: int) -> list[tuple[str, float]]:
    """What is shown of a query: the groups (both ends of many), then the other parts of the whole."""
    values = groups.values[query].tolist()
    chosen = list(range(len(values))) if len(values) <= 2 * SHOWN else ends(values, SHOWN)
    lines = [(_group(groups, groups.names[place]), values[place]) for place in chosen]
    if len(chosen) < len(values):
        others = sum(values) - sum(value for _, value in lines)
        lines.append((f"{len(values) - len(chosen):,} others", others))
    if groups.bias is not None:
        lines.append(("training, in the bias", float(groups.bias[query].sum())))
    if groups.initial is not None:
        rest = "" if groups.bias is not None else " and what is not explained"
        lines.append((f"initial weights{rest}", float(groups.initial[query])))
    return lines


def _strongest(line: "Timeline", query: int) -> list[tuple[str, list[float], str]]:
    values = line.values[query]
    order = values.abs().sum(1).argsort(descending=True).tolist()
    return [
        (_group(line, line.names[place]), values[place].tolist(), colour)
        for place, colour in zip(order, LINES, strict=False)
    ]


def _notes(groups: "Groups") -> Iterator[str]:
    if groups.residual is not None and len(groups):
        yield f"Residual: {float(groups.residual.abs().max()):.0e} at most."
    if groups.left_out:
        yield f"Left out, as no slots of them were kept: {', '.join(groups.left_out)}."
    if groups.remark:
        yield groups.remark
    if more := _more(len(groups)):
        yield more


def _numbers(groups: "Groups", values: list[float]) -> list[str]:
    return [plain(value) for value in values] if groups.score == "abs" else same_digits(values)


def _group(answer: "Groups | Timeline", name: Any) -> str:
    if not answer.column:
        return "all visits"
    return f"{visible_text(answer.column, 30)} {visible_text(answer.classes.named(answer.column, name))}"


def _heading(count: int, query: int) -> Markup | str:
    return tag("div", f"query {query}", style="font-weight:600;margin-top:.5em") if count > 1 else ""


def _more(count: int) -> str:
    return f"{count - QUERIES} more queries: answer[{QUERIES}] is the next." if count > QUERIES else ""


def _sums(answer: Any) -> str:
    if answer.score == "contribution":
        return f"What adds to {answer.target}"
    return "Sum of |α|" if answer.score == "abs" else "Sum of α"


def _unit(groups: "Groups") -> str:
    return {"contribution": "adds", "weight": "Σα", "abs": "Σ|α|"}[groups.score]


def _place(layer: str) -> str:
    return f"layer '{layer}'" if layer else "the whole network"
