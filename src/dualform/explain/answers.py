"""Answers: small frozen dataclasses of tensors and columns.

The first axis is the query, the second the training data.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import QueryError, require
from dualform.types import ClassNames, Score

from .notebook import Displayed, groups_html, groups_lines, timeline_html, timeline_lines


@dataclass(frozen=True)
class GroupRow:
    """One group of one query; ``name, value = row`` works too."""

    query: int
    name: Any
    value: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.name, self.value))


@dataclass(frozen=True)
class Groups(Displayed):
    """A score summed over groups of visits, ``values`` (query, group), ``names`` the groups.

    For contributions the parts sum to the whole: ``values`` + ``bias`` over all groups + ``initial`` (what is left of
    the first weights and biases) + ``residual`` = ``total``. In one layer the total is the layer's own part of the
    target, and ``values`` are parts of its weights alone. In the whole network ``values`` are parts of the weights and
    biases of all explained layers, ``bias`` is None, and the total is the first-order effect of these parameters.
    """

    layer: str
    """The layer that was asked; empty for the whole network."""
    column: str
    score: Score
    target: str
    names: tuple[Any, ...]
    values: Float[Tensor, "n G"]
    bias: Float[Tensor, "n G"] | None = None
    initial: Float[Tensor, " n"] | None = None
    total: Float[Tensor, " n"] | None = None
    left_out: tuple[str, ...] = ()
    """Layers of the network that could not be asked, as no slots of them were kept."""
    remark: str = ""
    """What a reader should know of these sums, in a sentence; or nothing."""
    classes: ClassNames = field(default=ClassNames(), kw_only=True, repr=False)
    """The names of the classes, for tables; ``names`` stay as they were noted."""

    def __len__(self) -> int:
        return self.values.shape[0]

    def __iter__(self) -> Iterator[GroupRow]:
        """Name and value of each group, those of the first query first."""
        return _rows(self.names, self.values.tolist())

    def __getitem__(self, query: int) -> "Groups":
        """The sums of one query."""
        cut = query_slice(query, len(self))
        tensors = {name: getattr(self, name) for name in ("values", "bias", "initial", "total")}
        return replace(self, **{name: t[cut] for name, t in tensors.items() if t is not None})

    def __str__(self) -> str:
        return "\n".join(groups_lines(self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return groups_html(self)

    @property
    def residual(self) -> Float[Tensor, " n"] | None:
        """The part of the total that the other parts leave unexplained (rounding)."""
        if self.total is None or self.initial is None:
            return None
        through_biases = 0.0 if self.bias is None else self.bias.sum(1)
        return self.total - self.values.sum(1) - through_biases - self.initial

    def largest(self, k: int) -> list[list[tuple[Any, float]]]:
        """The k groups with the largest values, for each query."""
        best = self.values.topk(min(k, len(self.names)), dim=1)
        return [
            [(self.names[i], v) for i, v in zip(ids, vs, strict=True)]
            for ids, vs in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def to_pandas(self) -> Any:
        """One line per query, one column per group."""
        pd = require("pandas", "pandas")
        frame = pd.DataFrame(self.values.numpy(), columns=pd.Index(self.names, name=self.column))
        frame.index.name = "query"
        return frame


@dataclass(frozen=True)
class Timeline(Displayed):
    """A score summed over stretches of training time, ``values`` (query, group, stretch); ``edges`` are steps.

    Stretch i holds the steps ``edges[i] < step <= edges[i + 1]``.
    """

    layer: str
    score: Score
    target: str
    column: str | None
    names: tuple[Any, ...]
    edges: Int[Tensor, " s1"]
    values: Float[Tensor, "n G s"]
    classes: ClassNames = field(default=ClassNames(), kw_only=True, repr=False)
    """The names of the classes, for tables; ``names`` stay as they were noted."""

    def __len__(self) -> int:
        return self.values.shape[0]

    def __iter__(self) -> Iterator[GroupRow]:
        """Name and stretches of each group, those of the first query first."""
        return _rows(self.names, self.values)

    def __getitem__(self, query: int) -> "Timeline":
        """The stretches of one query."""
        return replace(self, values=self.values[query_slice(query, len(self))])

    def __str__(self) -> str:
        return "\n".join(timeline_lines(self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return timeline_html(self)

    def to_pandas(self) -> Any:
        """One line per query, group and stretch."""
        pd = require("pandas", "pandas")
        n, groups, stretches = self.values.shape
        return pd.DataFrame({
            "query": np.repeat(np.arange(n), groups * stretches),
            self.column or "group": np.tile(np.repeat(np.array(self.names, dtype=object), stretches), n),
            "after": np.tile(self.edges[:-1].numpy(), n * groups),
            "upto": np.tile(self.edges[1:].numpy(), n * groups),
            "value": self.values.flatten().numpy(),
        })  # fmt: skip


def _rows(names: Sequence[Any], values: Iterable[Iterable[Any]]) -> Iterator[GroupRow]:
    """A line for each group, query by query."""
    for query, line in enumerate(values):
        for name, value in zip(names, line, strict=True):
            yield GroupRow(query, name, value)


def query_slice(query: int, count: int) -> slice:
    """The slice that holds one query; a negative number counts from the end."""
    if not -count <= query < count:
        raise QueryError(f"query {query} was not asked: this answer holds {count}, counted from 0.")
    return slice(query % count, query % count + 1)
