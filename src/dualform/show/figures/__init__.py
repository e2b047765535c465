"""Figures of answers, public as ``dualform.plot``. Each function is named after the question whose answer it draws.

Every function returns a ``matplotlib.figure.Figure`` and does not keep it. A notebook shows it by itself: neither
``%matplotlib`` nor pyplot is needed.
"""

from .allocations import allocations
from .answers import by, spotlight, timeline, top, top_by
from .canvas import Figure
from .evaluation import flips, lds, leave_one_out, subset_removal
from .heads import heads, heads_through

__all__ = [
    "Figure",
    "allocations",
    "by",
    "flips",
    "heads",
    "heads_through",
    "lds",
    "leave_one_out",
    "spotlight",
    "subset_removal",
    "timeline",
    "top",
    "top_by",
]
