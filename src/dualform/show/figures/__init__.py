"""Figures of answers, public as ``dualform.plot``. Each function is named after the question whose answer it draws.

Every function returns a ``matplotlib.figure.Figure`` and neither shows nor keeps it.
"""

from .allocations import allocations
from .answers import by, spotlight, timeline, top, top_by
from .canvas import Figure
from .heads import heads, heads_through

__all__ = ["Figure", "allocations", "by", "heads", "heads_through", "spotlight", "timeline", "top", "top_by"]
