r"""Which training examples built the direction along which a head separates tokens.

.. math:: \langle W, D\rangle = \langle W_Q, s W_K D\rangle = \langle W_K, s W_Q D^\top\rangle,\qquad W = s W_K^\top W_Q

With D the separating matrix, scaled to norm 1, this is the component of the head's own matrix along D. It is linear in
the query projection and in the key projection. Both are recorded, so it is an exact sum over their training examples:
once through the queries and once through the keys, and each of the two sums is the whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import ModelMismatch, QueryError, require
from dualform.explain import Groups, LinearFunctional, Memory
from dualform.progress import Progress

from .head_findings import HeadReport
from .head_inputs import HeadProjection, SingleHeadInputs


class DirectionGroup(NamedTuple):
    """A group of training visits, with its contribution to ⟨W, D⟩ through the queries and through the keys."""

    name: Any
    queries: float
    keys: float

    @property
    def mean(self) -> float:
        """The mean of both contributions. Over all groups, plus the initial weights, these sum to ⟨W, D⟩."""
        return (self.queries + self.keys) / 2


@dataclass(frozen=True)
class Origin:
    """The component of a head's matrix along a direction, and two spotlights on that number.

    ``queries`` and ``keys`` are used like any spotlight: ``origin.queries.top(5, layer=origin.queries.layer)``.
    """

    total: float
    queries: LinearFunctional
    keys: LinearFunctional

    def by(self, column: str = "index", *, progress: Progress = True) -> "GroupedDirection":
        """The contribution of each group of a column, through the queries and through the keys."""
        ways = [
            functional.by(column, layer=functional.layer, progress=progress) for functional in (self.queries, self.keys)
        ]
        return GroupedDirection(self.total, *ways)


@dataclass(frozen=True)
class GroupedDirection:
    """Parts of ⟨W, D⟩ by group. Those of ``queries`` and of ``keys`` each sum to ⟨W, D⟩, with the initial weights."""

    total: float
    queries: Groups
    keys: Groups

    def __len__(self) -> int:
        return len(self.queries.names)

    def __iter__(self) -> Iterator[DirectionGroup]:
        """Iterate over the groups."""
        values = (
            (groups.values + groups.bias)[0].tolist() for groups in (self.queries, self.keys) if groups.bias is not None
        )
        return (DirectionGroup(*line) for line in zip(self.queries.names, *values, strict=True))

    def largest(self, k: int = 10) -> list[DirectionGroup]:
        """The k groups with the largest mean contribution."""
        return sorted(self, key=lambda group: -group.mean)[:k]

    @property
    def initial(self) -> float:
        """The contribution that is left of the initial weights, mean of both sums."""
        assert self.queries.initial is not None and self.keys.initial is not None
        return float(self.queries.initial[0] + self.keys.initial[0]) / 2

    def to_pandas(self) -> Any:
        """A table with one row for each group."""
        pd = require("pandas", "pandas")
        return pd.DataFrame([{**group._asdict(), "mean": group.mean} for group in self])


def origin(memory: Memory, layer: str, head: HeadReport, norm: Literal["frobenius", "nuclear"] = "frobenius") -> Origin:
    """The origin of a head's direction, from its report on ``layer``, which was made with the memory's weights."""
    separation = head.separation if norm == "frobenius" else head.nuclear
    if separation is None or not separation.feasible:
        raise QueryError(
            f"head {head.head} has no separating matrix in the {norm} norm, so there is no origin to find."
        )
    inputs = head.sight
    if inputs.tokens is None:
        raise QueryError(
            f"head {head.head} of '{layer}' was reported on in its own space, where its matrix is not made of weights."
        )
    D = separation.W / separation.W.norm()
    key, query, scale = inputs.tokens.key, inputs.tokens.query, inputs.scale
    A, query_rows = scale * key.weight[head.head] @ D, query.weight[head.head]
    a = None
    if query.bias is not None:
        A, a, query_rows = A[:, :-1], A[:, -1], torch.cat([query_rows, query.bias[head.head].unsqueeze(1)], 1)
    total = float((inputs.W * D).sum())
    ways = Origin(
        total,
        _functional_of(memory, layer, query, inputs, A, a),
        _functional_of(memory, layer, key, inputs, scale * query_rows @ D.mT, None),
    )
    apart = max(abs(functional.total - total) for functional in (ways.queries, ways.keys))
    if apart > AGREEMENT * float(inputs.W.norm()):
        raise ModelMismatch(
            f"the report on head {head.head} of '{layer}' was made with other weights than this memory's at step "
            f"{memory.step} (⟨W, D⟩ is {total:.4g} and {ways.queries.total:.4g}). Ask memory.at(step), without a mask."
        )
    return ways


AGREEMENT = 1e-3
"""How far a memory's ⟨W, D⟩ may be from the report's, relative to the norm of W."""


def source_of(memory: Memory, layer: str, projection: HeadProjection) -> str:
    """The layer name of a projection in a memory, which is its path in the model or inside the attention layer."""
    return projection.module if projection.module in memory.layers or not layer else f"{layer}.{projection.module}"


def _functional_of(
    memory: Memory,
    layer: str,
    projection: HeadProjection,
    inputs: SingleHeadInputs,
    A: Float[Tensor, "d i"],
    a: Float[Tensor, " d"] | None,
) -> LinearFunctional:
    """The functional ⟨W, A⟩ of the rows of one head in a recorded projection."""
    name = source_of(memory, layer, projection)
    info, _ = memory.store.layer(name)
    first = projection.first + _own_head(projection, inputs.head) * len(A)
    matrix = torch.zeros(info.d_out, info.d_in, dtype=A.dtype)
    matrix[first : first + len(A)] = A
    bias = None
    if a is not None:
        bias = torch.zeros(info.d_out, dtype=A.dtype)
        bias[first : first + len(A)] = a
    return LinearFunctional(memory, name, matrix, bias)


def _own_head(projection: HeadProjection, head: int) -> int:
    """The index of the projection's head that this head uses; several heads may share one."""
    return head // projection.shared
