"""How the page writes numbers, and where it finds figures."""

from typing import Any

from .results import ARCHIVE


def figure(name: str, about: str) -> str:
    """A figure, if it is drawn."""
    return f"![{about}](../images/attention-svm/{name}.png)" if (ARCHIVE.images / f"{name}.png").exists() else ""


def part(*paragraphs: str) -> str:
    """Paragraphs that are there."""
    return "\n\n".join(each for each in paragraphs if each)


def number(value: float | None, digits: int = 3) -> str:
    """A number, or that there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def spread(given: dict[str, Any], digits: int = 3) -> str:
    """Mean ± deviation over trials."""
    return number(given["mean"], digits) + ("" if given["std"] is None else f" ± {given['std']:.{digits}f}")


def percent(share: float) -> str:
    """A share."""
    return f"{100 * share:.0f}"
