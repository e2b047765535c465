"""Several answers of one pass as people see them: one below the other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .hits import hits_html, hits_lines
from .markup import Markup, tag
from .sums import groups_html, groups_lines, timeline_html, timeline_lines
from .text import visible_text

if TYPE_CHECKING:
    from ..ask import ScanAnswers

GROUPS = 8
"""The most groups whose hits a notebook shows."""


def answers_html(answers: "ScanAnswers") -> str:
    """The displays of all answers."""
    cards = [] if answers.hits is None else [hits_html(answers.hits)]
    for name, hits in list(answers.hits_by.items())[:GROUPS]:
        cards += [tag("div", _group(name), style="font-weight:600;margin-top:.5em"), hits_html(hits)]
    if (hidden := len(answers.hits_by) - GROUPS) > 0:
        cards.append(tag("div", f"{hidden:,} more groups: see .hits_by.", style="opacity:.7"))
    cards += [groups_html(groups) for groups in answers.groups.values()]
    cards += [] if answers.timeline is None else [timeline_html(answers.timeline)]
    return str(tag("div", *(Markup(one) for one in cards)))


def answers_lines(answers: "ScanAnswers") -> Iterator[str]:
    """All answers as lines of text."""
    if answers.hits is not None:
        yield from hits_lines(answers.hits)
    for name, hits in answers.hits_by.items():
        yield f"{_group(name)}:"
        yield from hits_lines(hits)
    for groups in answers.groups.values():
        yield from groups_lines(groups)
    if answers.timeline is not None:
        yield from timeline_lines(answers.timeline)


def _group(name: object) -> str:
    return f"Group {visible_text(name)}"
