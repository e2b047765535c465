"""Numbers and noted values as text: the one place that formats them, for notebooks, terminals, figures and pages."""

import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST = 60
"""The most characters of a noted value that are shown."""

SYMBOLS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}

DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that turn the direction of the text after them."""

TINY = 1e-6
"""Columns of smaller numbers are written with powers of ten."""

BLOCKS = "▁▂▃▄▅▆▇█"


def same_digits(values: Iterable[float], least: int = 2) -> list[str]:
    """Format signed numbers with equal decimals, enough for three digits of the largest, so that columns add up."""
    values = list(values)
    largest = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
    if 0 < largest < TINY:
        return ["not kept" if math.isnan(value) else f"{value if abs(value) > 1e-99 else 0.0:+.2e}" for value in values]
    places = least if largest == 0 else min(9, max(least, 2 - math.floor(math.log10(largest))))
    return ["not kept" if math.isnan(value) else f"{value:+.{places}f}" for value in values]


def plain(value: float) -> str:
    """Format a number without a sign, with four digits or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ends(values: Sequence[float], shown: int) -> list[int]:
    """The indices of the largest and the smallest values, largest first; all indices if there are few."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    return order if len(order) <= 2 * shown else order[:shown] + order[-shown:]


def visible_text(value: Any, longest: int = LONGEST) -> str:
    """A value that somebody noted, cut to a length, with symbols for characters that would steer a terminal or page."""
    text = f"{value:.6g}" if isinstance(value, float) else "unknown" if value is None else str(value)
    shown = "".join(map(_visible, text[:longest]))
    return f"{shown}…" if len(text) > longest else shown


def _visible(character: str) -> str:
    if character in SYMBOLS:
        return SYMBOLS[character]
    if character in DIRECTIONS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
        return f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
    return character


def spark(values: Sequence[float], largest: float) -> str:
    """A row of numbers as a row of blocks; the middle block is 0."""
    middle = (len(BLOCKS) - 1) / 2
    return "".join(BLOCKS[round(middle * (1 + value / (largest or 1)))] for value in values)


def seen(times: int, first: int, last: int) -> str:
    """How often and when training saw an example."""
    if times == 1:
        return f"seen once, step {first:,}"
    return f"seen {times} times, steps {first:,} to {last:,}"
