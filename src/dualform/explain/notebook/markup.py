"""Blocks of HTML for notebooks: tables, bars, tiles, lines over time.

There is no script, no style sheet and no colour for text or paper, so that light and dark pages keep their own. Every
string that is not ``Markup`` is escaped.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .text import visible_text

BLUE, ORANGE, GREEN, PURPLE, VERMILION = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
"""Colours of Okabe and Ito. Blue adds, vermilion takes away."""

SOFT = "opacity:.7"
RULE = "1px solid rgba(128,128,128,.35)"
BAR = 7
"""The width of a bar, in em."""


class Markup(str):
    """HTML that is escaped already."""


def text(value: Any, longest: int = 60) -> Markup:
    """A value as it stands in a page; markup stays as it is."""
    return value if isinstance(value, Markup) else Markup(escape(visible_text(value, longest)))


def joined(*parts: Any, by: str = "") -> Markup:
    """Some parts one after the other; those that say nothing are left out."""
    return Markup(by.join(text(part, 10_000) for part in parts if part != ""))


def tag(name: str, *content: Any, style: str = "", **attributes: str) -> Markup:
    """An element with its style and attributes."""
    given = {**({"style": style} if style else {}), **attributes}
    head = " ".join([name, *(f'{key}="{escape(value)}"' for key, value in given.items())])
    return Markup(f"<{head}>{joined(*content)}</{name}>")


def card(title: Any, *content: Any, notes: Iterable[str] = ()) -> str:
    """A whole display: a title, its content, and sentences below in small print."""
    below = [tag("div", note, style=f"{SOFT};font-size:90%;margin-top:.4em;max-width:60em") for note in notes if note]
    head = tag("div", title, style="font-weight:600;margin-bottom:.4em")
    return str(
        tag("div", head, *content, *below, style="font-size:13px;line-height:1.45;margin:.3em 0;overflow-x:auto")
    )


def table(heads: Sequence[Any], lines: Iterable[Sequence[Any]], left: Iterable[int] = (0,)) -> Markup:
    """A table; columns are set to the right but for those in ``left``. A line that begins with ``TOTAL`` is bold."""
    at_left = set(left)

    def cells(name: str, values: Sequence[Any], more: str = "") -> Markup:
        side = ("left" if place in at_left else "right" for place in range(len(values)))
        style = "padding:.15em .6em;border:none;vertical-align:middle;font-variant-numeric:tabular-nums;text-align:"
        return joined(*(tag(name, value, style=style + at + more) for value, at in zip(values, side, strict=True)))

    rows = [
        cells("td", line[1:], f";font-weight:600;border-top:{RULE}") if line[0] is TOTAL else cells("td", line)
        for line in lines
    ]
    head = tag("thead", tag("tr", cells("th", heads, f";font-weight:500;{SOFT};border-bottom:{RULE}")))
    body = tag("tbody", *(tag("tr", row) for row in rows))
    return tag("table", head, body, style="border-collapse:collapse;width:auto;margin:.2em 0;font-size:100%")


TOTAL = object()
"""The first item of a line that is a total."""


def bar(value: float, largest: float, signed: bool = True) -> Markup:
    """A bar to the right of a middle line or, for a negative number, to its left; without ``signed`` all are right."""
    share = 100 * min(1.0, abs(value) / largest) if largest and value == value else 0.0
    colour = BLUE if value >= 0 else VERMILION
    inner = tag("div", style=f"width:{share:.1f}%;height:100%;background:{colour}")
    empty = tag("div", style="height:100%")
    half = "flex:1;height:100%;display:flex;"
    left = tag("div", inner if value < 0 else empty, style=half + "justify-content:flex-end")
    right = tag("div", inner if value >= 0 else empty, style=half + f"border-left:{RULE}")
    halves = (left, right) if signed else (right,)
    return tag("div", *halves, style=f"display:flex;width:{BAR}em;height:.8em")


def bars(values: Sequence[float]) -> list[Markup]:
    """A bar for each value, all on one scale."""
    finite = [value for value in values if value == value]
    largest, signed = max(map(abs, finite), default=0.0), min(finite, default=0.0) < 0
    return [bar(value, largest, signed) for value in values]


def tiles(parts: Iterable[Markup]) -> Markup:
    """Small blocks side by side, on as many lines as it takes."""
    return tag(
        "div", *parts, style="display:flex;flex-wrap:wrap;gap:.6em .4em;margin:.3em 0 .6em;align-items:flex-start"
    )


def tile(picture: Markup, head: Any, *below: str) -> Markup:
    """A picture with a number in bold and lines of small print."""
    lines = [tag("div", line, style=f"{SOFT};font-size:85%") for line in below if line]
    style = "text-align:center;width:6.4em;overflow-wrap:anywhere;font-variant-numeric:tabular-nums"
    return tag("div", picture, tag("div", head, style="font-weight:600"), *lines, style=style)


def image(address: str, alt: str) -> Markup:
    """A small picture."""
    style = f"width:64px;height:auto;image-rendering:pixelated;display:block;margin:0 auto;border:{RULE}"
    return Markup(f'<img src="{escape(address)}" alt="{escape(alt)}" style="{style}">')


def lines_over_time(lines: Sequence[tuple[str, Sequence[float], str]], begin: int, end: int) -> Markup:
    """Lines over training, each with its name, its numbers and its colour, and the steps at both ends."""
    width, height = 460.0, 110.0
    high = max([0.0, *(v for _, values, _ in lines for v in values)])
    low = min([0.0, *(v for _, values, _ in lines for v in values)])

    def y(value: float) -> float:
        return height - 4 - (height - 8) * (value - low) / ((high - low) or 1.0)

    drawn = []
    for name, values, colour in reversed(lines):
        points = " ".join(f"{(i + 0.5) / len(values) * width:.1f},{y(v):.1f}" for i, v in enumerate(values))
        title = tag("title", name)
        drawn.append(tag("polyline", title, points=points, fill="none", stroke=colour, **{"stroke-width": "1.8"}))
    zero = f"{y(0.0):.1f}"
    axis = tag("line", x1="0", x2=f"{width:.0f}", y1=zero, y2=zero, stroke="currentColor", **{"stroke-opacity": ".4"})
    box = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "width": f"{width:.0f}", "height": f"{height:.0f}"}
    svg = tag("svg", axis, *drawn, style="max-width:100%;display:block", role="img", **box)
    swatch = "display:inline-block;width:1.2em;height:.25em;vertical-align:middle;margin-right:.4em;background:"
    key = [
        tag("span", tag("span", style=swatch + colour), name, style="margin-right:1.2em;white-space:nowrap")
        for name, _, colour in lines
    ]
    ends = f"display:flex;justify-content:space-between;width:{width:.0f}px;max-width:100%;{SOFT};font-size:85%"
    steps = tag("div", tag("span", f"step {begin:,}"), tag("span", f"step {end:,}"), style=ends)
    return joined(svg, steps, tag("div", *key))
