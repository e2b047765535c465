"""The three answers to one question side by side: direct, predicted through training, retrained."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from dualform.errors import require

from ..notebook import Displayed, comparison_html

HEADING = "query   before   direct  predicted  retrained"


@dataclass(frozen=True)
class Comparison(Displayed):
    """The change of each query's target when some visits are left out, by each of the three answers.

    Where several choices were compared, the answers have a first axis for them, in the order of ``subsets``.
    """

    target: str
    before: Float[Tensor, " queries"]
    direct: Float[Tensor, "*choices queries"]
    predicted: Float[Tensor, "*choices queries"]
    retrained: Float[Tensor, "*choices queries"]
    subsets: tuple[str, ...] = ()
    """What was left out (or left alone), in words."""
    note: str = ""
    """What the predictions hold fixed, or take one branch of; empty where they are simply the slope."""

    def to_pandas(self) -> Any:
        """A table with one line for each choice and query."""
        pandas = require("pandas", "pandas")
        queries = len(self.before)
        choices = self.retrained.numel() // max(1, queries)
        columns: dict[str, Any] = {"query": np.tile(np.arange(queries), choices)}
        if self.subsets:
            columns["choice"] = np.repeat(np.array(self.subsets, object), queries)
        columns["before"] = np.tile(self.before.numpy(), choices)
        for name in ("direct", "predicted", "retrained"):
            columns[name] = getattr(self, name).flatten().numpy()
        return pandas.DataFrame(columns)

    def __str__(self) -> str:
        note = [f"Predicted: {self.note}"] if self.note else []
        return "\n".join([f"Change of {self.target} (trust the last column):", *self._lines(), *note])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return comparison_html(self)

    def _lines(self) -> Iterator[str]:
        if self.retrained.ndim == 1:
            yield HEADING
        for choice, changes in enumerate(zip(*map(_by_choice, self._answers), strict=True)):
            if self.retrained.ndim > 1:
                yield f"{self.subsets[choice]}:"
                yield HEADING
            for query, line in enumerate(zip(self.before.tolist(), *(part.tolist() for part in changes), strict=True)):
                before, *values = line
                yield f"{query:5d} {before:8.3f} " + "  ".join(f"{value:+8.3f}" for value in values)

    @property
    def _answers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.direct, self.predicted, self.retrained


def _by_choice(values: Float[Tensor, "*choices queries"]) -> Float[Tensor, "choices queries"]:
    return values if values.ndim > 1 else values[None]
