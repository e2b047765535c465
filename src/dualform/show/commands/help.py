"""The page "Errors and marks" in the terminal, section by section."""

import re
from difflib import get_close_matches
from importlib.resources import files

from rich.console import Console
from rich.markdown import Markdown

from dualform.errors import QueryError

_HEADING = re.compile(r"^### (\S+)$", flags=re.MULTILINE)
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def sections() -> dict[str, str]:
    """The text of each error and mark by its name, in the order of the page (a copy of docs/errors.md)."""
    page = (files("dualform.show.commands") / "errors.md").read_text(encoding="utf-8")
    _, *parts = _HEADING.split(re.sub(r"^## .*\n(?:(?!###).*\n)*", "", page, flags=re.MULTILINE))
    return {name: _LINK.sub(r"\1", text).strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def texts(name: str | None) -> dict[str, str]:
    """One section by its name, or all of them; names are told apart without regard to capitals."""
    text_by_name = sections()
    if name is None:
        return text_by_name
    titles = {title.lower(): title for title in text_by_name}
    if name.lower() not in titles:
        similar = [titles[title] for title in get_close_matches(name.lower(), titles, n=3)]
        advice = f"Do you mean {' or '.join(similar)}?" if similar else "'dualform help' lists the names."
        raise QueryError(f"there is no error or mark called '{name}'. {advice}")
    return {titles[name.lower()]: text_by_name[titles[name.lower()]]}


def print_help(name: str | None, console: Console) -> None:
    """Print one section, or the names of all of them."""
    text_by_name = texts(name)
    if name is None:
        errors = [title for title in text_by_name if title[0].isupper()]
        marks = [title for title in text_by_name if title not in errors]
        console.print("Errors:", ", ".join(errors), "\n", highlight=False)
        console.print("Marks:", ", ".join(marks), "\n", highlight=False)
        console.print("Print one of them with: dualform help NAME", highlight=False)
        return
    for title, text in text_by_name.items():
        console.print(f"[bold]{title}[/]\n")
        console.print(Markdown(text))
