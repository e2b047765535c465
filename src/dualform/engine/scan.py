"""Queries against a whole memory: one matrix product a block, reductions right behind it.

Nothing of size queries × slots is ever held: every reduction takes what it needs of some blocks before the next come.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.progress import OnProgress
from dualform.store import Block, Store, split_by_parameter
from dualform.types import LayerInfo, Score

from .stream import DecodedSlots, StoreView, stream

QUERY_ROWS = 1024
"""Query rows that are multiplied with a block at a time."""

ENTRIES = 1 << 21
"""Scores that are held before they are reduced, if there are few queries: a reduction has a price of its own."""


@dataclass(frozen=True)
class LayerQueries:
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

    def split(self) -> Iterator["LayerQueries"]:
        """The same queries, some examples at a time."""
        size = max(1, QUERY_ROWS // self.per_example) * self.per_example
        for begin in range(0, self.rows.shape[0], size):
            cut = slice(begin, begin + size)
            yield LayerQueries(
                self.rows[cut], None if self.directions is None else self.directions[cut], self.per_example
            )


@dataclass(frozen=True, eq=False)
class Scores:
    r"""The scores of some examples for some slots that follow each other.

    ``weight`` is :math:`\alpha = k\cdot q`, ``abs`` its absolute value, ``contribution`` :math:`c\,\alpha\,(e\cdot u)`.
    ``first`` is the number of the first example, ``spare`` is room for the absolute values; all of it is only good
    until the next slots come.
    """

    first: int
    blocks: Sequence[Block]
    raw: Float[Tensor, "r m"]
    pull: Float[Tensor, "r m"] | None
    spare: Float[Tensor, "r m"]
    per_example: int
    whole: bool = False
    """Whether ``pull`` is the contribution already, and not a factor of α."""

    def __getitem__(self, score: Score) -> Float[Tensor, "n m"]:
        return {"weight": self._weight, "abs": self._abs, "contribution": self._contribution}[score]()

    @cached_property
    def ids(self) -> Int[np.ndarray, " m"]:
        """The number of each slot in its layer."""
        return self.of_blocks(lambda block: block.slots)

    def of_blocks(self, known: Callable[[Block], np.ndarray]) -> Shaped[np.ndarray, " m"]:
        """Something that is known of each slot of a block, for all the slots here."""
        return np.concatenate([known(block) for block in self.blocks])

    def _weight(self) -> Tensor:
        return self._add(self.raw)

    def _abs(self) -> Tensor:
        return self._absolute

    @cached_property
    def _absolute(self) -> Tensor:
        return self._add(torch.abs(self.raw, out=self.spare))

    def _contribution(self) -> Tensor:
        return self._pulled

    @cached_property
    def _pulled(self) -> Tensor:
        assert self.pull is not None, "contributions need directions"
        return self._add(self.pull if self.whole else self.raw * self.pull)

    def _add(self, scores: Float[Tensor, "r m"]) -> Float[Tensor, "n m"]:
        return scores if self.per_example == 1 else scores.unflatten(0, (-1, self.per_example)).sum(1)


@runtime_checkable
class Reduction(Protocol):
    """Something that is built up from one score, some slots at a time."""

    @property
    def score(self) -> Score:
        """The score it is built from."""
        ...

    def add(self, scores: Scores) -> None:
        """Take the scores of some slots more."""
        ...


def scan(
    store: Store, layer: str, view: StoreView, queries: LayerQueries, reductions: Sequence[Reduction], *,
    of_step: Sequence[Float[np.ndarray, " T1"]] | None = None, watch: OnProgress | None = None,
) -> None:  # fmt: skip
    """Show every slot of the view to every reduction. Contributions need ``of_step``, the coefficients of each piece
    of the layer.
    """
    pulls = any(reduction.score == "contribution" for reduction in reductions)
    parts = list(queries.split())
    rows = len(parts[0].rows)
    width = max(store.block_rows(layer), ENTRIES // rows if len(parts) == 1 else 0)
    room = ScanBuffer(store.layer(layer)[0], rows, width, store.compute, of_step if pulls else None)
    for slots in stream(store, layer, view, errors=pulls, watch=watch):
        if not room.fits(slots):
            room.reduce(parts[0], 0, reductions)
        first = 0
        for part in parts:
            room.take(slots, part)
            if len(parts) > 1:
                room.reduce(part, first, reductions)
            first += len(part)
    room.reduce(parts[0], 0, reductions)


def weights_of(
    layer: LayerInfo, rows: Float[Tensor, "r k"], keys: Float[Tensor, "m k"], out: Float[Tensor, "r m"] | None = None
) -> Float[Tensor, "r m"]:
    r"""The attention weights :math:`\alpha = k \cdot q`; of one-hot keys 1 where the index is the same."""
    if not layer.indexed:
        return torch.mm(rows, keys.mT, out=out)
    same = (rows == keys.mT).to(rows.dtype)
    return same if out is None else out.copy_(same)


class ScanBuffer:
    """Where products with blocks lie side by side until there are enough of them to be worth a reduction.

    ``of_step`` are the coefficients of the layer's pieces if contributions are asked for.
    """

    def __init__(
        self, layer: LayerInfo, rows: int, width: int, dtype: torch.dtype, of_step: Sequence[np.ndarray] | None
    ) -> None:
        self.layer = layer
        self.raw = torch.empty(rows, width, dtype=dtype)
        self.spare = torch.empty_like(self.raw)
        self.pull = None if of_step is None else torch.empty_like(self.raw)
        self.of_step = of_step
        self.blocks: list[Block] = []
        self.used = 0

    def fits(self, slots: DecodedSlots) -> bool:
        """Whether there is room for these slots too."""
        return self.used + len(slots.ids) <= self.raw.shape[1]

    def take(self, slots: DecodedSlots, queries: LayerQueries) -> None:
        """Multiply some slots with the queries."""
        place = slice(self.used, self.used + len(slots.ids))
        raw = self.raw[: len(queries.rows), place]
        weights_of(self.layer, queries.rows, slots.keys, raw)
        if slots.block.key_scale is not None:
            raw *= slots.block.key_scale
        if self.pull is not None:
            assert queries.directions is not None and slots.errors is not None and self.of_step is not None
            pull = self.pull[: len(queries.rows), place]
            self._pull(slots, queries.rows, queries.directions, pull)
        self.blocks.append(slots.block)
        self.used = place.stop

    def _pull(self, slots: DecodedSlots, rows: Tensor, directions: Tensor, pull: Float[Tensor, "r m"]) -> None:
        """What each slot contributes to the target, where several pieces or parts of the layer are added up."""
        assert slots.errors is not None and self.of_step is not None
        if len(self.of_step) == 1 and self.layer.parts == 1:
            torch.mm(directions, slots.errors.mT, out=pull).mul_(slots.values(self.of_step[0]))
            return
        pull.zero_()
        for piece, of_piece in zip(self.layer.pieces, self.of_step, strict=True):
            value = slots.values(of_piece)
            if slots.block.key_scale is not None:
                value = value * slots.block.key_scale
            for k, e in split_by_parameter(self.layer):
                some = slice(k.start + piece.begin, k.start + piece.end)
                pull += (rows[:, some] @ slots.keys[:, some].mT) * (directions[:, e] @ slots.errors[:, e].mT) * value

    def reduce(self, queries: LayerQueries, first: int, reductions: Sequence[Reduction]) -> None:
        """Show what is here to the reductions, and make room."""
        if not self.used:
            return
        here = (slice(len(queries.rows)), slice(self.used))
        pull = None if self.pull is None else self.pull[here]
        whole = len(self.of_step or ()) > 1 or self.layer.parts > 1
        scores = Scores(first, self.blocks, self.raw[here], pull, self.spare[here], queries.per_example, whole)
        for reduction in reductions:
            reduction.add(scores)
        self.blocks, self.used = [], 0
