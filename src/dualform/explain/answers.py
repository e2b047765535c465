"""Answers: small frozen dataclasses of tensors and columns.

The first axis is the query, the second the training data.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import QueryError, require
from dualform.types import Score


@dataclass(frozen=True)
class Hit:
    """One slot that answers a query. The visit's columns are attributes too: ``hit.label``, ``hit.index``."""

    query: int
    rank: int
    slot: int
    step: int
    position: int
    weight: float
    contribution: float
    columns: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        columns = object.__getattribute__(self, "columns")
        if name in columns:
            return columns[name]
        raise AttributeError(f"a hit has no '{name}'; its columns are {list(columns)}")


@dataclass(frozen=True)
class Hits:
    """The best slots of each query. All tensors are (query, rank).

    ``weight`` is α, ``contribution`` what the slot adds to the target.
    """

    layer: str
    score: Score
    target: str
    slots: Int[Tensor, "n k"]
    steps: Int[Tensor, "n k"]
    positions: Int[Tensor, "n k"]
    visits: Int[Tensor, "n k"]
    weight: Float[Tensor, "n k"]
    contribution: Float[Tensor, "n k"]
    columns: pa.Table
    """The visits' columns, one line per hit, query by query; null where the visit is not known."""

    def __len__(self) -> int:
        return self.slots.shape[0]

    @property
    def scores(self) -> Float[Tensor, "n k"]:
        """The scores by which the hits were chosen."""
        scores = self.contribution if self.score == "contribution" else self.weight
        return scores.abs() if self.score == "abs" else scores

    def __iter__(self) -> Iterator[Any]:
        """The hits of the only query, or one ``Hits`` per query."""
        if len(self) == 1:
            return iter([self._hit(0, rank) for rank in range(self.slots.shape[1])])
        return iter([self[i] for i in range(len(self))])

    def __getitem__(self, query: int) -> "Hits":
        """The hits of one query."""
        cut, k = _query_slice(query, len(self)), self.slots.shape[1]
        tensors = (
            t[cut] for t in (self.slots, self.steps, self.positions, self.visits, self.weight, self.contribution)
        )
        return Hits(self.layer, self.score, self.target, *tensors, columns=self.columns.slice(cut.start * k, k))

    def _hit(self, query: int, rank: int) -> Hit:
        at = (query, rank)
        line = {
            name: column[query * self.slots.shape[1] + rank].as_py() for name, column in self._columns_by_name().items()
        }
        return Hit(
            query, rank, int(self.slots[at]), int(self.steps[at]), int(self.positions[at]), float(self.weight[at]),
            float(self.contribution[at]), line,
        )  # fmt: skip

    def _columns_by_name(self) -> dict[str, Any]:
        return {name: self.columns[name] for name in self.columns.column_names}

    def to_pandas(self) -> Any:
        """One line per hit."""
        pd = require("pandas", "pandas")
        n, k = self.slots.shape
        data = {"query": np.repeat(np.arange(n), k), "rank": np.tile(np.arange(k), n)}
        for name in ("slots", "steps", "positions", "weight", "contribution"):
            data[name.removesuffix("s") if name != "weight" else name] = getattr(self, name).flatten().numpy()
        frame = pd.DataFrame(data)
        for name in self.columns.column_names:
            if name not in frame:
                frame[name] = self.columns[name].to_pandas().to_numpy()
        return frame


@dataclass(frozen=True)
class Groups:
    """A score summed over groups of visits, ``values`` (query, group), ``names`` the groups.

    For contributions the parts sum to the whole: ``values`` + ``bias`` over all groups + ``initial`` (what is left of
    the first weights and biases) + ``residual`` = ``total``, the layer's own part of the target.
    """

    layer: str
    column: str
    score: Score
    target: str
    names: tuple[Any, ...]
    values: Float[Tensor, "n G"]
    bias: Float[Tensor, "n G"] | None = None
    initial: Float[Tensor, " n"] | None = None
    total: Float[Tensor, " n"] | None = None

    def __len__(self) -> int:
        return self.values.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """Name and value of each group for the only query, or one ``Groups`` per query."""
        if len(self) == 1:
            return iter(list(zip(self.names, self.values[0].tolist(), strict=True)))
        return iter([self[i] for i in range(len(self))])

    def __getitem__(self, query: int) -> "Groups":
        """The sums of one query."""
        cut = _query_slice(query, len(self))
        tensors = {name: getattr(self, name) for name in ("values", "bias", "initial", "total")}
        return replace(self, **{name: t[cut] for name, t in tensors.items() if t is not None})

    @property
    def residual(self) -> Float[Tensor, " n"] | None:
        """The part of the total that the other parts leave unexplained (rounding)."""
        if self.total is None or self.bias is None or self.initial is None:
            return None
        return self.total - self.values.sum(1) - self.bias.sum(1) - self.initial

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
class Timeline:
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

    def __len__(self) -> int:
        return self.values.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """Name and stretches of each group for the only query, or one ``Timeline`` per query."""
        if len(self) == 1:
            return iter(list(zip(self.names, self.values[0], strict=True)))
        return iter([self[i] for i in range(len(self))])

    def __getitem__(self, query: int) -> "Timeline":
        """The stretches of one query."""
        return replace(self, values=self.values[_query_slice(query, len(self))])

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


def _query_slice(query: int, count: int) -> slice:
    """The slice that holds one query; a negative number counts from the end."""
    if not -count <= query < count:
        raise QueryError(f"query {query} was not asked: this answer holds {count}, counted from 0.")
    return slice(query % count, query % count + 1)
