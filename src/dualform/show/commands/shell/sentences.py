"""Warnings of ours as one sentence: on the command line there is no line of a program that they could point at."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from dualform.errors import DualformWarning


@contextmanager
def warnings_as_sentences(console: Console) -> Iterator[None]:
    """Print warnings of ours without a file and a line; all others are shown as before."""
    before = warnings.showwarning

    def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, DualformWarning):
            console.print(f"dualform: {message}")
        else:
            before(message, category, *place, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
