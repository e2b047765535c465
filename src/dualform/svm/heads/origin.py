r"""Which training examples built the direction that a head separates tokens by.

.. math:: \langle W, D\rangle = \langle W_Q, s W_K D\rangle = \langle W_K, s W_Q D^\top\rangle,\qquad W = s W_K^\top W_Q

With D the separating matrix, scaled to norm 1, this is how far the head's own matrix goes along it. It is linear in the
projection that makes queries, and in the one that makes keys. Both are recorded, so it is an exact sum over what they
were trained on: once through the queries, once through the keys, each of which sums to the whole.
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
    """A group of training visits, and what it put into ⟨W, D⟩ through the queries and through the keys."""

    name: Any
    queries: float
    keys: float

    @property
    def mean(self) -> float:
        """Of both ways; over all groups and the beginning these sum to ⟨W, D⟩."""
        return (self.queries + self.keys) / 2


@dataclass(frozen=True)
class Origin:
    """How far a head's matrix goes along a direction, and two spotlights on that number.

    ``queries`` and ``keys`` answer as any spotlight does: ``origin.queries.top(5, layer=origin.queries.layer)``.
    """

    total: float
    queries: LinearFunctional
    keys: LinearFunctional

    def by(self, column: str = "index", *, progress: Progress = True) -> "GroupedDirection":
        """What each group of a column put into it, both ways."""
        ways = [each.by(column, layer=each.layer, progress=progress) for each in (self.queries, self.keys)]
        return GroupedDirection(self.total, *ways)


@dataclass(frozen=True)
class GroupedDirection:
    """Parts of ⟨W, D⟩ by groups. Each way sums to the whole, with what was left of the first weights."""

    total: float
    queries: Groups
    keys: Groups

    def __len__(self) -> int:
        return len(self.queries.names)

    def __iter__(self) -> Iterator[DirectionGroup]:
        """Group by group."""
        values = ((each.values + each.bias)[0].tolist() for each in (self.queries, self.keys) if each.bias is not None)
        return (DirectionGroup(*line) for line in zip(self.queries.names, *values, strict=True))

    def largest(self, k: int = 10) -> list[DirectionGroup]:
        """The groups that put most into it."""
        return sorted(self, key=lambda each: -each.mean)[:k]

    @property
    def initial(self) -> float:
        """What the first weights still have in it, mean of both ways."""
        assert self.queries.initial is not None and self.keys.initial is not None
        return float(self.queries.initial[0] + self.keys.initial[0]) / 2

    def to_pandas(self) -> Any:
        """One line a group."""
        pd = require("pandas", "pandas")
        return pd.DataFrame([{**each._asdict(), "mean": each.mean} for each in self])


def origin(memory: Memory, layer: str, head: HeadReport, norm: Literal["frobenius", "nuclear"] = "frobenius") -> Origin:
    """Where the direction of a head comes from: a report on layer ``layer``, made with the memory's weights."""
    found = head.separation if norm == "frobenius" else head.nuclear
    if found is None or not found.feasible:
        raise QueryError(f"head {head.head} has no separating matrix in the {norm} norm to look for the origin of.")
    sight = head.sight
    if sight.tokens is None:
        raise QueryError(
            f"head {head.head} of '{layer}' was seen in its own space, where its matrix is not made of weights."
        )
    D = found.W / found.W.norm()
    key, query, scale = sight.tokens.key, sight.tokens.query, sight.scale
    A, whole = scale * key.weight[head.head] @ D, query.weight[head.head]
    a = None
    if query.bias is not None:
        A, a, whole = A[:, :-1], A[:, -1], torch.cat([whole, query.bias[head.head].unsqueeze(1)], 1)
    total = float((sight.W * D).sum())
    ways = Origin(
        total,
        _along(memory, layer, query, sight, A, a),
        _along(memory, layer, key, sight, scale * whole @ D.mT, None),
    )
    apart = max(abs(each.total - total) for each in (ways.queries, ways.keys))
    if apart > ALIKE * float(sight.W.norm()):
        raise ModelMismatch(
            f"the report on head {head.head} of '{layer}' was made with other weights than this memory's at step "
            f"{memory.step} (⟨W, D⟩ is {total:.4g} and {ways.queries.total:.4g}). Ask memory.at(step), without a mask."
        )
    return ways


ALIKE = 1e-3
"""How far a memory's ⟨W, D⟩ may be from the report's, beside the norm of W."""


def source_of(memory: Memory, layer: str, of: HeadProjection) -> str:
    """What a projection is called in a memory: by its name in the model, or inside its layer."""
    return of.module if of.module in memory.layers or not layer else f"{layer}.{of.module}"


def _along(
    memory: Memory,
    layer: str,
    of: HeadProjection,
    sight: SingleHeadInputs,
    A: Float[Tensor, "d i"],
    a: Float[Tensor, " d"] | None,
) -> LinearFunctional:
    """⟨W, A⟩ of the rows that one head has in a recorded projection."""
    name = source_of(memory, layer, of)
    info, _ = memory.store.layer(name)
    first = of.first + _own_head(of, sight.head) * len(A)
    whole = torch.zeros(info.d_out, info.d_in, dtype=A.dtype)
    whole[first : first + len(A)] = A
    bias = None
    if a is not None:
        bias = torch.zeros(info.d_out, dtype=A.dtype)
        bias[first : first + len(A)] = a
    return LinearFunctional(memory, name, whole, bias)


def _own_head(of: HeadProjection, head: int) -> int:
    """Which of the projection's own heads this one has: several may share one."""
    return head // of.shared
