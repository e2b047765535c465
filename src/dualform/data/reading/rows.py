"""The rows of a data file or table, as tensors that a network takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxtyping import Shaped
from torch import Tensor

from .columns import Columns
from .vocabulary import Vocabulary


@dataclass(frozen=True)
class DataRows:
    """Rows as :func:`dualform.data.read` gives them. ``len(rows)`` is their number."""

    inputs: Shaped[Tensor, "n ..."]
    labels: Shaped[Tensor, " n"] | None = None
    columns: Columns | None = None
    """How the columns of a table became ``inputs``: pass it to ``read`` for other rows, and to ``tape.describe``."""
    others: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs by name: those that were asked for, and ``padding`` (True where a text has ended)."""
    source: Path | None = None
    """The file that they were read from."""
    features: tuple[str, ...] = ()
    """The name of each number of a row, if the rows are those of a table: ``age``, ``colour = red``."""
    integers: bool = False
    """Whether every input column of the table holds whole numbers (``inputs`` are floating point all the same)."""
    vocabulary: Vocabulary | None = None
    """What turned texts into tokens."""
    tokens: str | None = None
    """The name that it was given by: ``bytes``, or a file."""

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their numbers; empty if they are not known."""
        return () if self.columns is None else self.columns.classes
