"""A memory in TensorBoard: numbers as scalars, the certificate and tables as text."""

from typing import Any

from dualform.explain import Memory

from .contents import Tables, contents


def tensorboard(memory: Memory, writer: Any, *, tables: Tables | None = None, step: int | None = None) -> None:
    """Write a memory's numbers, certificate and tables with a ``torch.utils.tensorboard.SummaryWriter``.

    ``tables`` are answers by name, such as ``{"top": spot.top(5)}``. ``step`` is by default that of the
    memory.
    """
    logged, at = contents(memory, tables), memory.step if step is None else step
    for name, value in logged.numbers.items():
        writer.add_scalar(name, value, at)
    writer.add_text("dualform/certificate", _preformatted(logged.text), at)
    for name, frame in logged.tables.items():
        writer.add_text(name, _markdown(frame), at)
    writer.flush()


def _preformatted(text: str) -> str:
    """Text whose lines stay as they are: Markdown shows lines that begin with four spaces so."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _markdown(frame: Any) -> str:
    """A DataFrame as a table in Markdown."""
    rows = [list(frame.columns), ["---"] * len(frame.columns), *frame.values.tolist()]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows)


def _cell(cell: Any) -> str:
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell).replace("|", "\\|").replace("\n", " ")
