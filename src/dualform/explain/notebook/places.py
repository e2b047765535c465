"""Places of hits as people see them: the positions of the query and of each training example that count most."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from .hits import noted_of
from .markup import bars, card, table
from .text import same_digits, visible_text

if TYPE_CHECKING:
    from ..hits import HitPlaces

HITS, POSITIONS = 24, 3
"""The most hits that a notebook shows, and the positions of each that are named."""


def places_html(places: "HitPlaces") -> str:
    """A line for each hit: what it adds, and the positions of the query and of the example that count most."""
    hits = list(places.hits)[:HITS]
    numbers, pictures = same_digits(hit.contribution for hit in hits), bars([hit.contribution for hit in hits])
    lines = [
        [picture, number, _noted(hit), *_largest(places, hit.rank)]
        for hit, number, picture in zip(hits, numbers, pictures, strict=True)
    ]
    more = f"… and {len(places) - len(hits)} more." if len(places) > len(hits) else ""
    heads = ["", "adds", "hit", "through positions of the query", "from its own positions"]
    return card(_heading(places), table(heads, lines, left=(0, 2, 3, 4)), notes=(more,))


def places_lines(places: "HitPlaces") -> Iterator[str]:
    """The hits as lines of text, each with the positions that count most."""
    yield f"{_heading(places)}:"
    hits = list(places.hits)
    for hit, number in zip(hits, same_digits(hit.contribution for hit in hits), strict=True):
        of_query, of_training = _largest(places, hit.rank)
        yield f"  {number}  {_noted(hit)} ({places.hits.when(hit)})"
        yield f"    through the query's   {of_query}"
        yield f"    from the example's    {of_training}"


def _heading(places: "HitPlaces") -> str:
    place = f"layer '{places.layer}'" if places.layer else "the whole network"
    return f"The positions that count most in {len(places)} hits for {places.target}, in {place}"


def _noted(hit: object) -> str:
    return ", ".join(f"{visible_text(name)} {visible_text(value)}" for name, value in noted_of(hit).items())


def _largest(places: "HitPlaces", rank: int) -> tuple[str, str]:
    """The largest parts of a hit, of the query and of the training example."""
    return (
        _words(places.query[rank], float(places.query_elsewhere[rank])),
        _words(places.training[rank], float(places.training_elsewhere[rank])),
    )


def _words(parts: Tensor, elsewhere: float) -> str:
    best = parts.abs().topk(min(POSITIONS, len(parts))).indices.tolist()
    rest = float(parts.sum() - parts[best].sum())
    values = [*(float(parts[position]) for position in best), rest, elsewhere]
    names = [*(f"position {position}" for position in best), "other positions", "elsewhere"]
    shown = [
        f"{name} {number}" for name, number, value in zip(names, same_digits(values), values, strict=True) if value
    ]
    return ", ".join(shown) or "nothing"
