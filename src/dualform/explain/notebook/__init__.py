"""Answers as people see them: HTML for notebooks, lines for ``print``, numbers and noted values as text."""

from .displayed import Displayed
from .hits import PLACES, hits_html, hits_lines
from .illustrations import Illustrations, illustrate, illustrations_of
from .markup import BLUE, GREEN, ORANGE, PURPLE, VERMILION
from .places import places_html, places_lines
from .png import data_address, png
from .runs import check_html, comparison_html, influence_html
from .spotlight import spotlight_html, spotlight_lines
from .sums import groups_html, groups_lines, timeline_html, timeline_lines
from .suspects import suspects_html
from .text import ends, plain, same_digits, seen, visible_text
from .weights import certificate_html, ledger_html, ledger_lines, memory_html

__all__ = [
    "BLUE",
    "GREEN",
    "ORANGE",
    "PLACES",
    "PURPLE",
    "VERMILION",
    "Displayed",
    "Illustrations",
    "certificate_html",
    "check_html",
    "comparison_html",
    "data_address",
    "ends",
    "groups_html",
    "groups_lines",
    "hits_html",
    "hits_lines",
    "illustrate",
    "illustrations_of",
    "influence_html",
    "ledger_html",
    "ledger_lines",
    "memory_html",
    "places_html",
    "places_lines",
    "plain",
    "png",
    "same_digits",
    "seen",
    "spotlight_html",
    "spotlight_lines",
    "suspects_html",
    "timeline_html",
    "timeline_lines",
    "visible_text",
]
