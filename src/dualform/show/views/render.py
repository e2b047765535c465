"""Views as pages: the templates and the formats of numbers."""

from dataclasses import asdict, is_dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dualform.svm.expansion import power

from ..text import plain, same_digits, size

FOLDER = Path(__file__).parent


@cache
def environment() -> Environment:
    """The Jinja environment of the templates; values are escaped."""
    templates = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        auto_reload=False,
    )
    templates.filters |= {
        "bytes": size,
        "duration": duration,
        "first_up": lambda text: text[:1].upper() + text[1:],
        "minus": minus,
        "percent": percent,
        "plain": plain,
        "power": power,
        "same_digits": lambda values: [minus(text) for text in same_digits(values)],
        "stacked": stacked,
        "signed": lambda value, least=2: minus(same_digits([value], least)[0]),
    }
    templates.globals["ui"] = templates.get_template("macros.html").module
    return templates


def render(template: str, **values: Any) -> str:
    """Fill a template."""
    return environment().get_template(template).render(**values)


def style() -> str:
    """The style sheet of all pages."""
    return (FOLDER / "style.css").read_text(encoding="utf-8")


def as_plain(value: Any) -> Any:
    """A view as plain values for JSON; a float that is not finite becomes null."""
    if is_dataclass(value) and not isinstance(value, type):
        return as_plain(asdict(value))
    if isinstance(value, dict):
        return {str(name): as_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(part) for part in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str | type(None)) else str(value)


def stacked(view: Any) -> dict[str, Any]:
    """The bars of a timeline: one group and all others, stacked if they have the same sign."""
    time = view.time
    own = time.own or (0.0,) * len(time.others)
    ups = [max(own_value, 0) + max(other_value, 0) for own_value, other_value in zip(own, time.others, strict=True)]
    downs = [min(own_value, 0) + min(other_value, 0) for own_value, other_value in zip(own, time.others, strict=True)]
    high, low, wide = max(ups), min(downs), 600 / len(ups)
    unit = 120 / ((high - low) or 1)
    zero, bars = 5 + unit * high, []
    for i, pair in enumerate(zip(own, time.others, strict=True)):
        up = down = 0.0
        for kind, value in zip(("plus", "minus"), pair, strict=True):
            kind = kind if time.own else "plus" if value >= 0 else "minus"
            begin = up if value >= 0 else down
            top = begin + value if value >= 0 else begin
            bars.append({
                "kind": kind, "x": round(i * wide + 1, 2), "width": round(max(0.5, wide - 2), 2),
                "y": round(zero - unit * top, 2), "height": round(unit * abs(value), 2),
            })  # fmt: skip
            up, down = (up + value, down) if value >= 0 else (up, down + value)
    return {"bars": [bar for bar in bars if bar["height"]], "zero": round(zero, 2)}


def minus(text: str) -> str:
    """The text with real minus signs in place of hyphens."""
    return text.replace("-", "−")


def percent(value: float) -> str:
    """A fraction as per cent."""
    return f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 5) * 5:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
