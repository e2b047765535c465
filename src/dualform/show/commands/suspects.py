"""``dualform suspects``: training examples whose label looks wrong, printed on the terminal, and all of them as CSV."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow.csv as pa_csv
import torch
from rich.console import Console
from torch import nn

from dualform.errors import QueryError
from dualform.explain import Memory, Suspects

from ..examples import Examples
from ..inputs import together
from ..text import examples_view

PICTURES = 10
"""How many of the suspects are shown."""


def find_suspects(
    memory: Memory, model: nn.Module, examples: Examples, classes: Sequence[str], column: str
) -> Suspects:  # fmt: skip
    """The suspects among the training examples, which have a class each."""
    if examples.labels is None or examples.is_stream:
        raise QueryError(
            "the training examples have no labels; suspects are examples with a class each: --label names the column."
        )
    numbers = list(range(len(examples)))
    inputs = together(examples.rows(numbers), examples.beside(numbers), model)
    labels = torch.as_tensor(examples.labels) if hasattr(examples.labels, "__array__") else _listed(examples)
    return memory.suspects(model, inputs, labels, column=column, classes=tuple(classes))


def write_suspects(suspects: Suspects, out: Path) -> None:
    """Write all examples with their scores to a CSV file."""
    try:
        pa_csv.write_csv(suspects.table, out)
    except OSError as error:
        raise QueryError(f"cannot write {out}: {error}.") from error


def print_suspects(
    memory: Memory, suspects: Suspects, examples: Examples, count: int, out: Path | None, console: Console
) -> None:  # fmt: skip
    """Print the first suspects, and show them where they are pictures or passages."""
    console.print(f"[bold]{memory.path}[/] at step {memory.step:,}:")
    console.print(suspects.to_rich(count))
    if examples.kind in ("image", "text"):
        _show(suspects, examples, min(count, PICTURES), console)
    if out is not None:
        console.print(f"All {len(suspects):,} examples are in {out}.", soft_wrap=True)


def _listed(examples: Examples) -> torch.Tensor:
    """The labels of a data set, one by one."""
    return torch.tensor([int(examples.labels[row]) for row in range(len(examples))])


def _show(suspects: Suspects, examples: Examples, count: int, console: Console) -> None:
    """The suspects themselves, each under its label and the suggested one."""
    lines = suspects.table.slice(0, count).to_pylist()
    heads = [
        f"{line['index']}: {suspects.class_name(line['label'])} → {suspects.class_name(line['suggested'])}"
        for line in lines
    ]
    rows = suspects.rows[:count].tolist()
    console.print(examples_view(examples, rows, heads, [None] * len(rows), console.color_system is not None))
