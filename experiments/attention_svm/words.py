"""Formatting of numbers, paragraphs and figures on the results page."""

from typing import Any

from .results import ARCHIVE


def figure(name: str, about: str) -> str:
    """Markdown for a figure, or an empty string if its image does not exist."""
    return f"![{about}](../images/attention-svm/{name}.png)" if (ARCHIVE.images / f"{name}.png").exists() else ""


def part(*paragraphs: str) -> str:
    """Join the paragraphs that are not empty."""
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def number(value: float | None, digits: int = 3) -> str:
    """A number with fixed digits, or a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def spread(given: dict[str, Any], digits: int = 3) -> str:
    """Mean ± standard deviation over trials."""
    return number(given["mean"], digits) + ("" if given["std"] is None else f" ± {given['std']:.{digits}f}")


def percent(share: float) -> str:
    """A share in per cent, rounded to a whole number."""
    return f"{100 * share:.0f}"
