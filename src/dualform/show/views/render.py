"""Views as pages: the templates, and how numbers are written in them."""

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
    """The templates; whatever is put into them is escaped."""
    made = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
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
    made.globals["ui"] = made.get_template("macros.html").module
    return made


def render(template: str, **values: Any) -> str:
    """A page."""
    return environment().get_template(template).render(**values)


def style() -> str:
    """How all pages look."""
    return (FOLDER / "style.css").read_text(encoding="utf-8")


def as_plain(value: Any) -> Any:
    """A view as plain values for JSON; what is no number is null."""
    if is_dataclass(value) and not isinstance(value, type):
        return as_plain(asdict(value))
    if isinstance(value, dict):
        return {str(name): as_plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(each) for each in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str | type(None)) else str(value)


def stacked(view: Any) -> dict[str, Any]:
    """The bars of a timeline: a group and all others, on top of each other where they have the same sign."""
    time = view.time
    own = time.own or (0.0,) * len(time.others)
    ups = [max(a, 0) + max(b, 0) for a, b in zip(own, time.others, strict=True)]
    downs = [min(a, 0) + min(b, 0) for a, b in zip(own, time.others, strict=True)]
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
    """A number with a real minus sign."""
    return text.replace("-", "−")


def percent(value: float) -> str:
    """A share for people."""
    return f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 5) * 5:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
