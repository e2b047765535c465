"""Hits as people see them: training examples with what each adds, as pictures, passages or lines of columns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .illustrations import Illustrations, illustrations_of
from .markup import Markup, bars, card, joined, tag, text, tile, tiles
from .markup import table as html_table
from .text import same_digits, visible_text

if TYPE_CHECKING:
    from ..hits import Hits

QUERIES, RANKS, COLUMNS, PASSAGE = 8, 24, 8, 240
"""The most queries, hits of each, columns of a table and characters of a passage that a notebook shows."""

PLACES = ("visit", "step", "row")
"""Columns of a visit that the user has not noted."""


def hits_html(hits: "Hits") -> str:
    """The hits of each query: tiles if they have pictures, else a table with bars."""
    looks = illustrations_of(hits.folder)
    parts = []
    for query in range(min(QUERIES, len(hits))):
        heading = [tag("div", f"query {query}", style="font-weight:600;margin-top:.5em")] if len(hits) > 1 else []
        parts.append(joined(*heading, _one_query(hits[query], looks)))
    more = f"{len(hits) - QUERIES} more queries: hits[{QUERIES}] is the next." if len(hits) > QUERIES else ""
    return card(hits_heading(hits), *parts, notes=(more, *hits_notes(hits)))


def hits_lines(hits: "Hits") -> Iterator[str]:
    """The hits as lines of text."""
    yield f"{hits_heading(hits)}:"
    for query in range(len(hits)):
        if len(hits) > 1:
            yield f"query {query}"
        rows = list(hits[query])
        for hit, value in zip(rows, _values(hits, rows)[1], strict=True):
            noted = ", ".join(f"{visible_text(name)} {visible_text(column)}" for name, column in noted_of(hit).items())
            yield f"  {value}  {noted} ({hits.when(hit)})"
    yield from hits_notes(hits)


def hits_heading(hits: "Hits") -> str:
    """What the hits are, in words."""
    place = f"layer '{hits.layer}'" if hits.layer else "the whole network"
    by = {"contribution": "", "weight": ", by weight α", "abs": ", by weight |α|"}[hits.score]
    return f"The {hits.weight.shape[1]} {hits.per}s that count most for {hits.target}, in {place}{by}"


def hits_notes(hits: "Hits") -> Iterator[str]:
    """What a reader should know of the hits, in sentences."""
    if hits.left_out:
        yield f"Left out, as no slots of them were kept: {', '.join(hits.left_out)}."
    if hits.remark:
        yield hits.remark


def example_tiles(
    looks: Illustrations, examples: Iterable[tuple[Any, str, Mapping[str, Any], str]]
) -> Markup:  # fmt: skip
    """Pictures of examples: their index, a number, what was noted, and one more line."""
    return tiles(
        tile(
            looks.image_of(index) or tag("div", "no picture", style="opacity:.6"),
            number,
            *(f"{visible_text(name, 20)} {visible_text(value, 20)}" for name, value in noted.items()),
            more,
        )
        for index, number, noted, more in examples
    )


def example_table(
    examples: Sequence[tuple[Any, float, Mapping[str, Any], str]], looks: Illustrations | None, heading: str
) -> Markup:
    """A table of examples: a bar and a number, what was noted, how the example reads, and one more column."""
    columns = [{**noted, **(looks.columns_of(index) if looks else {})} for index, _, noted, _ in examples]
    names = list(dict.fromkeys(name for line in columns for name in line))[:COLUMNS]
    values = [value for _, value, _, _ in examples]
    lines = [
        [picture, number, *(_cell(line.get(name, ""), name) for name in names), tag("div", more, style="min-width:7em")]
        for picture, number, line, (_, _, _, more) in zip(
            bars(values), same_digits(values), columns, examples, strict=True
        )
    ]
    left = [0, *(2 + place for place, name in enumerate(names) if _reads(columns, name))]
    return html_table(["", heading, *map(visible_text, names), "when"], lines, left)


def _one_query(hits: "Hits", looks: Illustrations | None) -> Markup:
    rows = list(hits)[:RANKS]
    values, numbers = _values(hits, rows)
    hidden = hits.weight.shape[1] - len(rows)
    more = tag("div", f"… and {hidden} more", style="opacity:.7") if hidden > 0 else ""
    if looks is not None and looks.kind == "pictures":
        examples = [
            (_index(hit), number, noted_of(hit), hits.when(hit)) for hit, number in zip(rows, numbers, strict=True)
        ]
        return joined(example_tiles(looks, examples), more)
    lines = [(_index(hit), value, noted_of(hit), hits.when(hit)) for hit, value in zip(rows, values, strict=True)]
    heading = "adds" if hits.score == "contribution" else "weight α"
    return joined(example_table(lines, looks, heading), more)


def _values(hits: "Hits", rows: list[Any]) -> tuple[list[float], list[str]]:
    """The scores of some hits, as numbers and as text."""
    if hits.score == "contribution":
        values = [hit.contribution for hit in rows]
        return values, same_digits(values)
    values = [hit.weight for hit in rows]
    numbers = same_digits(values)
    return values, [number.lstrip("+") for number in numbers] if min(values, default=0) >= 0 else numbers


def noted_of(hit: Any) -> dict[str, Any]:
    """What the user noted of a hit."""
    return {name: value for name, value in hit.columns.items() if value is not None and name not in PLACES}


def _index(hit: Any) -> Any:
    return hit.columns.get("index")


def _cell(value: Any, name: str) -> Markup:
    if name == "passage":
        return tag("div", text(value, PASSAGE), style="min-width:18em;max-width:44em")
    return text(value)


def _reads(columns: list[dict[str, Any]], name: str) -> bool:
    """Whether a column holds words, which are set to the left."""
    return any(isinstance(line.get(name), str) for line in columns)
