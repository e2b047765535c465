"""A memory in Weights & Biases: numbers and the certificate in the summary of a run, tables as tables."""

from typing import Any

from dualform.errors import require
from dualform.explain import Memory

from .contents import Tables, contents


def wandb(memory: Memory, run: Any, *, tables: Tables | None = None) -> None:
    """Add a memory's numbers, certificate and tables to a run that ``wandb.init`` gave.

    ``tables`` are answers by name, such as ``{"top": spot.top(5)}``. The steps of the run go on as before.
    """
    table = require("wandb").Table
    logged = contents(memory, tables)
    run.summary.update({**logged.numbers, "dualform/certificate_text": logged.text})
    if logged.tables:
        run.log({name: table(dataframe=frame) for name, frame in logged.tables.items()})
