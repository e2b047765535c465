"""A figure that notebooks show by themselves. This file needs matplotlib: it is imported when a figure is drawn."""

from io import BytesIO

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A matplotlib figure that a notebook shows without ``%matplotlib`` and without pyplot."""

    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
