"""Numbers as pages write them: one way for all of them, with real minus signs and powers of ten."""

import math
from collections.abc import Sequence

TINY, HUGE = 1e-4, 1e6
"""Numbers below and above are written with a power of ten."""

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float, digits: int = 3) -> str:
    """One number: 0.417, −12.3, 1,240, 3.1·10⁻⁷."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    if size == 0:
        return "0"
    if not TINY <= size < HUGE:
        return power_of_ten(value, digits - 1)
    places = max(0, digits - 1 - math.floor(math.log10(size)))
    return minus(f"{value:,.{places}f}")


def signed(value: float, digits: int = 3) -> str:
    """One number with its sign."""
    text = number(value, digits)
    return text if value <= 0 or not math.isfinite(value) else f"+{text}"


def signed_alike(values: Sequence[float], digits: int = 3) -> list[str]:
    """Numbers of one column with their signs: as many decimals for all as the largest needs, so that they add up."""
    return _alike(values, digits, "+")


def numbers_alike(values: Sequence[float], finest: float) -> list[str]:
    """Numbers with as many decimals as their distance needs."""
    if finest <= 0 or max((abs(value) for value in values), default=0.0) >= HUGE or finest < TINY:
        return [number(value) for value in values]
    places = max(0, -math.floor(math.log10(finest) + 1e-9) + (0 if _is_round(finest) else 1))
    return [minus(f"{value + 0.0:,.{places}f}") for value in values]


def _is_round(step: float) -> bool:
    """Whether one digit is enough for a step: 0.2, and not 0.25."""
    first = step / 10 ** math.floor(math.log10(step) + 1e-9)
    return abs(first - round(first)) < 1e-6


def _alike(values: Sequence[float], digits: int, sign: str) -> list[str]:
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest and not TINY <= largest < HUGE:
        return [signed(value, digits) if sign else number(value, digits) for value in values]
    places = 2 if largest == 0 else max(0, digits - 1 - math.floor(math.log10(largest)))
    return ["–" if math.isnan(value) else _unsigned_zero(minus(f"{value:{sign},.{places}f}")) for value in values]


def _unsigned_zero(text: str) -> str:
    """0.00 without a sign: what is smaller than the last digit has none."""
    return text if any(digit in text for digit in "123456789") else text.lstrip("+−")


def power_of_ten(value: float, digits: int = 2) -> str:
    """3.1·10⁻⁷"""
    mantissa, exponent = f"{value:.{max(0, digits - 1)}e}".split("e")
    return f"{minus(mantissa)}·10{str(int(exponent)).translate(SUPERSCRIPTS)}"


def minus(text: str) -> str:
    """The text with real minus signs in place of hyphens."""
    return text.replace("-", "−")


def percent(value: float) -> str:
    """A fraction as per cent; what is not quite 0 or 1 does not look like it."""
    if 0 < value < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= value < 1:
        return "> 99.9 %"
    return minus(f"{100 * value:.1f} %")


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 5) * 5:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def counted(count: int, what: str) -> str:
    """A number of things: "1 visit", "2,000 visits"."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
