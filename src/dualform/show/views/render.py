"""Views as pages: the templates and the formats of numbers."""

from dataclasses import asdict, is_dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dualform.svm.expansion import power

from ..text import size
from .explorer import visible
from .numbers import duration, minus, number, percent, signed, signed_alike

FOLDER = Path(__file__).parent
PARTS = ("numbers", "charts", "examples", "answers", "attention", "heads", "pending")
"""The files of macros that all pages share, in templates/parts."""

LEVELS = 10


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
        "levels": levels,
        "minus": minus,
        "number": number,
        "percent": percent,
        "seen": lambda token: token if token.strip() else visible(token),
        "power": power,
        "signed": signed,
        "signed_alike": signed_alike,
    }
    modules = [templates.get_template(f"parts/{name}.html").module for name in PARTS]
    macros = {name: macro for module in modules for name, macro in vars(module).items() if callable(macro)}
    templates.globals["ui"] = SimpleNamespace(**macros)
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


def levels(values: tuple[float, ...]) -> str:
    """Numbers as whole levels from −10 to 10, relative to the largest, for scripts to colour by."""
    most = max((abs(value) for value in values), default=0.0)
    return ",".join(str(round(LEVELS * value / most)) for value in values) if most else ""
