"""Answers about the training set itself: suspects, and how much examples speak for themselves."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dualform.errors import require

from ..notebook import Displayed, self_influence_html, suspects_html, visible_text

SHOWN = 10
"""How many suspects are printed."""

DUPLICATE = 1e-3
"""The distance below which two examples are near-duplicates."""


@dataclass(frozen=True)
class Suspect:
    """One training example: its label, the label that the others suggest, and the chance that its label is wrong."""

    index: int
    label: int
    suggested: int
    score: float
    suspect: bool
    loss: float
    confidence: float
    visits: int


@dataclass(frozen=True)
class Suspects(Displayed):
    """Every training example, the most suspicious first.

    The columns of ``table``: ``index``, ``label``; ``suggested``, the likeliest other label; ``score``, one minus the
    probability of the given label; ``suspect``, whether the suggested label is likelier than the given one. Beside
    them the trivial scores of the network at this step: ``loss`` and ``confidence``, its probability of the given
    label. Then ``visits`` (0: never used in training); ``own``, what the example put into its own margin through the
    last layer; ``nearest`` and ``distance``, the most similar other example. Columns that could not be had are not
    there: ``left_out`` says why. ``voices`` says what the score is made of.
    """

    table: pa.Table
    rows: Int[np.ndarray, " n"]
    """The row of x of each line."""
    voices: tuple[str, ...]
    left_out: Mapping[str, str]
    classes: tuple[str, ...] = ()
    """The names of the classes, for printing."""
    folder: str = field(default="", kw_only=True, repr=False)
    """The folder of the memory that was asked."""

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Suspect]:
        """The examples, the most suspicious first."""
        names = list(Suspect.__dataclass_fields__)
        return (Suspect(**line) for line in self.table.select(names).to_pylist())

    @property
    def scores(self) -> Float[Tensor, " n"]:
        """The score of each row of x, in the order of x: for :func:`dualform.evaluate.mislabelled`."""
        return self.column("score")

    def column(self, name: str) -> Tensor:
        """A column in the order of x."""
        values = torch.from_numpy(self.table[name].to_numpy().copy())
        return torch.empty_like(values).index_copy_(0, torch.from_numpy(self.rows), values)

    def to_pandas(self) -> Any:
        """One line an example, the most suspicious first."""
        require("pandas", "pandas")
        return self.table.to_pandas()

    def to_datalab(self) -> Any:
        """The same in the order of x under the names of cleanlab's Datalab, whose scores are low for a wrong label."""
        pandas = require("pandas", "pandas")
        columns = {
            "is_label_issue": self.column("suspect").numpy(),
            "label_score": 1 - self.scores.numpy(),
            "given_label": self.column("label").numpy(),
            "predicted_label": torch.where(
                self.column("suspect"), self.column("suggested"), self.column("label")
            ).numpy(),
        }
        if "distance" in self.table.column_names:
            distance = self.column("distance").numpy()
            columns |= {"is_near_duplicate_issue": distance <= DUPLICATE, "distance_to_nearest_neighbor": distance}
        return pandas.DataFrame(columns, index=pandas.Index(self.column("index").numpy(), name="index"))

    def near_duplicates(self, distance: float = DUPLICATE) -> list[tuple[int, int]]:
        """Pairs of examples that are nearly the same to the first layer, by their indices."""
        if "distance" not in self.table.column_names:
            return []
        lines = self.table.select(["index", "nearest", "distance"]).to_pylist()
        pairs = {tuple(sorted((line["index"], line["nearest"]))) for line in lines if line["distance"] <= distance}
        return sorted((a, b) for a, b in pairs)

    @property
    def never_used(self) -> list[int]:
        """The indices of examples that training never saw."""
        return sorted(
            line["index"] for line in self.table.select(["index", "visits"]).to_pylist() if not line["visits"]
        )

    def class_name(self, label: int) -> str:
        """The name of a class; its number if it has none."""
        return self.classes[label] if 0 <= label < len(self.classes) else str(label)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return suspects_html(self)

    def __rich__(self) -> Group:
        return self.to_rich()

    def to_rich(self, count: int = SHOWN) -> Group:
        """The most suspicious examples as a table for the terminal, and the summary."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("index", "label → suggested", "score", "loss", "confidence", "visits"):
            table.add_column(heading, justify="left" if "→" in heading else "right")
        for line in self.table.slice(0, count).to_pylist():
            change = f"{self.class_name(line['label'])} → {self.class_name(line['suggested'])}"
            numbers = (f"{line['score']:.3f}", f"{line['loss']:.3g}", f"{line['confidence']:.3f}")
            table.add_row(str(line["index"]), Text(visible_text(change, 80)), *numbers, str(line["visits"]))
        return Group(table, Text(self.summary))

    @property
    def summary(self) -> str:
        """How many suspects there are, and what the scores are made of."""
        count = int(np.count_nonzero(self.table["suspect"].to_numpy()))
        sentences = [f"{count:,} of {len(self):,} examples look wrong. The score weighs {', '.join(self.voices)}."]
        sentences += [f"No {name}: {reason}." for name, reason in self.left_out.items()]
        if unused := len(self.never_used):
            sentences.append(f"{unused:,} examples were never used in training.")
        return " ".join(sentences)

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=100, color_system=None)
        console.print(self)
        assert isinstance(console.file, StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip("\n")


@dataclass(frozen=True)
class SelfInfluence(Displayed):
    """How much each training example adds to a number about itself, in the order of x.

    For the ``margin`` of its own label a large value means that the network needs this example to get it right: wrong
    labels look like this, and so do rare examples. ``layers`` are those that count; others are in ``left_out``.
    """

    index: Int[np.ndarray, " n"]
    values: Float[Tensor, " n"]
    visits: Int[Tensor, " n"]
    layers: tuple[str, ...]
    target: str
    left_out: Mapping[str, str]
    folder: str = field(default="", kw_only=True, repr=False)
    """The folder of the memory that was asked."""

    def __len__(self) -> int:
        return len(self.values)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self_influence_html(self)

    def largest(self, k: int) -> list[tuple[int, float]]:
        """The k examples that add most to their own target: index and value."""
        best = self.values.topk(min(k, len(self)))
        return [(int(self.index[i]), v) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def to_pandas(self) -> Any:
        """One line an example."""
        pandas = require("pandas", "pandas")
        return pandas.DataFrame(
            {"index": self.index, "self_influence": self.values.numpy(), "visits": self.visits.numpy()}
        )

    def __str__(self) -> str:
        named = ", ".join(f"example {index} ({value:+.3g})" for index, value in self.largest(3))
        sentences = [f"Most is added to its own {self.target} by {named}, through {', '.join(self.layers)}."]
        sentences += [f"Left out: {name}, as {reason}." for name, reason in self.left_out.items()]
        return " ".join(sentences)
