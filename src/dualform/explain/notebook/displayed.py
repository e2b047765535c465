"""How IPython and marimo find the displays of an answer."""

from typing import Any


class Displayed:
    """An answer that a notebook shows as HTML, and whose plain form is what ``print`` shows."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._repr_pretty_ = Displayed._repr_pretty_  # IPython prefers the __repr__ of a class to what it inherits

    def _repr_html_(self) -> str:
        raise NotImplementedError

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The plain form beside the HTML, for IPython in a terminal and for notebooks that are read as text."""
        printer.text("…" if cycle else str(self))
