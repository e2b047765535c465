"""Queries against a whole memory: one matrix product a block, reductions right behind it.

Nothing of size queries × slots is ever held: every reduction takes what it needs of a block before the next one comes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from torch import Tensor

from dualform.memory import Store
from dualform.types import Score

from .stream import Slots, View, Watch, stream

QUERY_ROWS = 1024
"""Query rows that are multiplied with a block at a time."""


@dataclass(frozen=True)
class Queries:
    """What is asked of one layer.

    ``rows`` are the layer's inputs q, example by example, ``per_example`` rows each (tokens, or several calls);
    ``directions`` the gradient u of the target with respect to the layer's output at each row. Scores of the rows of
    one example are added: results have one line an example.
    """

    rows: Float[Tensor, "r d_in"]
    directions: Float[Tensor, "r d_out"] | None = None
    per_example: int = 1

    def __len__(self) -> int:
        return self.rows.shape[0] // self.per_example

    def split(self) -> Iterator["Queries"]:
        """The same queries, some examples at a time."""
        size = max(1, QUERY_ROWS // self.per_example) * self.per_example
        for begin in range(0, self.rows.shape[0], size):
            cut = slice(begin, begin + size)
            yield Queries(self.rows[cut], None if self.directions is None else self.directions[cut], self.per_example)


@dataclass(frozen=True, eq=False)
class Scores:
    r"""The scores of some examples for the slots of one block.

    ``weight`` is :math:`\alpha = k\cdot q`, ``abs`` its absolute value, ``contribution`` :math:`c\,\alpha\,(e\cdot u)`.
    ``first`` is the number of the first example.
    """

    first: int
    raw: Float[Tensor, "r m"]
    pull: Float[Tensor, "r m"] | None
    per_example: int

    def __getitem__(self, score: Score) -> Float[Tensor, "n m"]:
        return {"weight": self._weight, "abs": self._abs, "contribution": self._contribution}[score]()

    def _weight(self) -> Tensor:
        return self._add(self.raw)

    def _abs(self) -> Tensor:
        return self._absolute

    @cached_property
    def _absolute(self) -> Tensor:
        return self._add(self.raw.abs())

    def _contribution(self) -> Tensor:
        return self._pulled

    @cached_property
    def _pulled(self) -> Tensor:
        assert self.pull is not None, "contributions need directions"
        return self._add(self.raw * self.pull)

    def _add(self, scores: Float[Tensor, "r m"]) -> Float[Tensor, "n m"]:
        return scores if self.per_example == 1 else scores.unflatten(0, (-1, self.per_example)).sum(1)


@runtime_checkable
class Reduction(Protocol):
    """Something that is built up block by block from one score."""

    @property
    def score(self) -> Score:
        """The score it is built from."""
        ...

    def add(self, slots: Slots, scores: Scores) -> None:
        """Take the scores of a block."""
        ...


def scan(
    store: Store, layer: str, view: View, queries: Queries, reductions: Sequence[Reduction], *,
    of_step: Float[np.ndarray, " T1"] | None = None, watch: Watch | None = None,
) -> None:  # fmt: skip
    """Show every slot of the view to every reduction. Contributions need ``of_step``, the weight's coefficients."""
    pulls = any(reduction.score == "contribution" for reduction in reductions)
    parts = list(queries.split())
    for slots in stream(store, layer, view, errors=pulls, watch=watch):
        first = 0
        for part in parts:
            scores = _score(slots, part, first, of_step if pulls else None)
            for reduction in reductions:
                reduction.add(slots, scores)
            first += len(part)


def _score(slots: Slots, queries: Queries, first: int, of_step: np.ndarray | None) -> Scores:
    raw = queries.rows @ slots.keys.mT
    if slots.block.key_scale is not None:
        raw *= slots.block.key_scale
    pull = None
    if of_step is not None:
        assert queries.directions is not None and slots.errors is not None
        pull = (queries.directions @ slots.errors.mT).mul_(slots.values(of_step))
    return Scores(first, raw, pull, queries.per_example)
