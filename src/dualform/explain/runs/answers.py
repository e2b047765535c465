"""Answers of a replayed run: is it exact, and what would change without an example."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from dualform.arguments import one_of
from dualform.errors import QueryError, require
from dualform.replay import Difference

from ..groups import groups_of_visits, require_column
from ..notebook import Displayed, check_html, influence_html


@dataclass(frozen=True)
class RunCheck(Displayed):
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

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return check_html(self)

    def _how_far(self) -> str:
        if self.difference is None or self.difference.largest is None:
            return ""
        names = ", ".join(self.parameters[:4]) + (", …" if len(self.parameters) > 4 else "")
        when = "" if self.difference.step == self.first_difference else f"after step {self.difference.step} "
        return f" ({when}by up to {self.difference.largest:.2g}, in {names})"


@dataclass(frozen=True)
class Influence(Displayed):
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
    index_column: str = field(default="index", kw_only=True)
    """The column of the visits that holds their example."""
    note: str = field(default="", kw_only=True)
    """What the answer holds fixed, or takes one branch of, in sentences; empty where it is simply the slope."""
    folder: str = field(default="", kw_only=True, repr=False)
    """The folder of the memory that was asked."""

    def __len__(self) -> int:
        return len(self.values)

    def top(self, k: int = 10, query: int = 0) -> list[tuple[Any, float]]:
        """The examples with the largest influence on a query, by their index, the strongest supporter first."""
        values, places = self.values[query].topk(min(k, len(self.index)))
        return [
            (self.index[place].item(), value) for place, value in zip(places.tolist(), values.tolist(), strict=True)
        ]

    def by(self, column: str) -> dict[Any, Float[Tensor, " queries"]]:
        """The influence of groups of visits: the values of a noted column; None for visits without one."""
        require_column(self.visits, column)
        names, groups = groups_of_visits(self.visits, column)
        names = (*names, None) if (groups == len(names)).any() else names
        sums = self.per_visit.new_zeros(len(self), len(names)).index_add_(1, torch.from_numpy(groups), self.per_visit)
        return {name: sums[:, i] for i, name in enumerate(names)}

    def visits_of(self, index: Any, query: int = 0) -> list[tuple[int, float]]:
        """The steps that saw an example, and its influence on a query by each of these visits alone.

        Leaving the example out at one step only changes the target by about minus the value of that step.
        """
        visits = np.flatnonzero(self.visits[self.index_column].to_numpy() == index)
        if not len(visits):
            raise QueryError(
                f"no visit of example {index!r}: training saw {len(self.index):,} examples, from {self.index[0]} to "
                f"{self.index[-1]}."
            )
        steps, values = self.visits["step"].to_numpy()[visits], self.per_visit[query, torch.from_numpy(visits)]
        return list(zip(steps.tolist(), values.tolist(), strict=True))

    def to_pandas(self, per: Literal["example", "visit"] = "example") -> Any:
        """A table with one line for each query and example; or for each query and visit, with its noted columns."""
        pandas = require("pandas", "pandas")
        one_of("per", per, ("example", "visit"))
        queries, examples = self.values.shape
        if per == "visit":
            table = pandas.concat([self.visits.to_pandas()] * queries, ignore_index=True)
            table.insert(0, "query", np.repeat(np.arange(queries), len(self.visits)))
            return table.assign(influence=self.per_visit.flatten().numpy())
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
        text = (
            f"{self.kind}: without example {index} {self.target} of query 0 would be about {abs(value):.2g} {change}."
        )
        return f"{text} {self.note}".strip()

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return influence_html(self, [self.note])
