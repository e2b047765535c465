"""A memory in Trackio: numbers as metrics of a run, tables as tables, the certificate as a table of one cell."""

from typing import Any

from dualform.errors import require
from dualform.explain import Memory

from .contents import Tables, contents


def trackio(memory: Memory, run: Any, *, tables: Tables | None = None) -> None:
    """Log a memory's numbers, certificate and tables, once, to a run that ``trackio.init`` gave.

    ``tables`` are answers by name, such as ``{"top": spot.top(5)}``.
    """
    package = require("trackio")
    logged = contents(memory, tables)
    frames = {name: package.Table(dataframe=frame) for name, frame in logged.tables.items()}
    run.log({**logged.numbers, **frames, "dualform/certificate_text": package.Markdown(f"```\n{logged.text}\n```")})
