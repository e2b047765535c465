"""Answers of a replayed run: is it exact, and what would change without an example."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError, require
from dualform.replay import Difference


@dataclass(frozen=True)
class RunCheck:
    """Whether a run came out as it was recorded: the first step that differs, and how far off it was where that is
    known.
    """

    first: int
    last: int
    first_difference: int | None = None
    difference: Difference | None = None
    """The first difference that shows parameters: a log has a checksum of each step, and now and then a whole state."""
    reason: str = ""

    @property
    def exact(self) -> bool:
        return self.first_difference is None

    @property
    def steps(self) -> int:
        """The number of steps that were run again."""
        return self.last - self.first + 1

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that differ, the farthest first, as far as they are known."""
        return () if self.difference is None else self.difference.parameters

    def __str__(self) -> str:
        if self.exact:
            return f"{self.steps} steps were run again, and every compared entry is the recorded one bit for bit."
        return (
            f"The run differs from the recorded one from step {self.first_difference} of {self.last} on"
            f"{self._how_far()}. {self.reason}"
        )

    def _how_far(self) -> str:
        if self.difference is None or self.difference.largest is None:
            return ""
        names = ", ".join(self.parameters[:4]) + (", …" if len(self.parameters) > 4 else "")
        when = "" if self.difference.step == self.first_difference else f"after step {self.difference.step} "
        return f" ({when}by up to {self.difference.largest:.2g}, in {names})"


@dataclass(frozen=True)
class Influence:
    """How a target depends on each example: positive where the example speaks for it.

    Leaving the example out of this run changes the target by about minus its value. ``values`` is (query, example), the
    columns in the order of ``index``.
    """

    kind: Literal["through training", "direct", "gradient", "ekfac"]
    target: str
    index: np.ndarray
    values: Float[Tensor, "queries examples"]
    visits: pa.Table
    per_visit: Float[Tensor, "queries visits"]

    def __len__(self) -> int:
        return len(self.values)

    def top(self, k: int = 10, query: int = 0) -> list[tuple[Any, float]]:
        """The examples with the largest influence on a query, by their index, the strongest supporter first."""
        values, places = self.values[query].topk(min(k, len(self.index)))
        return [
            (self.index[place].item(), value) for place, value in zip(places.tolist(), values.tolist(), strict=True)
        ]

    def by(self, column: str) -> dict[Any, Float[Tensor, " queries"]]:
        """The influence of groups of visits: the values of a noted column."""
        if column not in self.visits.column_names:
            raise QueryError(f"no column {column!r}; the visits have {self.visits.column_names}.")
        names, groups = np.unique(self.visits[column].to_numpy(zero_copy_only=False), return_inverse=True)
        sums = self.per_visit.new_zeros(len(self), len(names)).index_add_(1, torch.from_numpy(groups), self.per_visit)
        return {name.item() if hasattr(name, "item") else name: sums[:, i] for i, name in enumerate(names)}

    def to_pandas(self) -> Any:
        """A table with one line for each query and example."""
        pandas = require("pandas", "pandas")
        queries, examples = self.values.shape
        return pandas.DataFrame(
            {
                "query": np.repeat(np.arange(queries), examples),
                "index": np.tile(self.index, queries),
                "influence": self.values.flatten().numpy(),
            }
        )

    def __str__(self) -> str:
        index, value = self.top(1)[0]
        change = "lower" if value > 0 else "higher"
        return (
            f"{self.kind}: without example {index} {self.target} of query 0 would be about {abs(value):.2g} {change}."
        )
