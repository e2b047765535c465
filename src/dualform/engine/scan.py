"""Queries against a whole memory: one matrix product for each block, followed at once by the reductions.

Nothing of size queries × slots is ever in memory: every reduction takes what it needs from the scores of some blocks
before the next blocks are read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.progress import OnProgress
from dualform.store import Block, LayerMatrix, Store
from dualform.types import LayerInfo, Score

from .stream import DecodedSlots, StoreView, stream, stream_together

QUERY_ROWS = 1024
"""The number of query rows that are multiplied with a block at a time."""

ENTRIES = 1 << 21
"""The number of scores that are collected before they are reduced, if there are few queries: a call of a reduction has
a cost of its own."""


@dataclass(frozen=True)
class LayerQueries:
    """The queries for one layer.

    ``rows`` are the layer's inputs q, example by example, ``per_example`` rows each (tokens, or several calls);
    ``directions`` the gradient u of the target with respect to the layer's output at each row. The scores of the rows
    of one example are added: results have one row for each example. ``biases`` are gradients of the target with respect
    to biases of the layer: with them, contributions are those through the weights and these biases.

    The rows of an embedding are row numbers; rows as wide as its table say how much the target feels of each entry.
    """

    rows: Float[Tensor, "r d_in"]
    directions: Float[Tensor, "r d_out"] | None = None
    per_example: int = 1
    biases: Mapping[str, Float[Tensor, "n d_out"]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.rows.shape[0] // self.per_example

    def split(self) -> Iterator["LayerQueries"]:
        """The same queries in batches of examples."""
        size = max(1, QUERY_ROWS // self.per_example) * self.per_example
        for begin in range(0, self.rows.shape[0], size):
            yield self.of_examples(slice(begin // self.per_example, (begin + size) // self.per_example))

    def of_examples(self, examples: slice) -> "LayerQueries":
        """The queries of some examples."""
        rows = slice(examples.start * self.per_example, examples.stop * self.per_example)
        directions = None if self.directions is None else self.directions[rows]
        biases = {name: gradient[examples] for name, gradient in self.biases.items()}
        return LayerQueries(self.rows[rows], directions, self.per_example, biases)


@dataclass(frozen=True, eq=False)
class Scores:
    r"""The scores of examples for consecutive slots, valid until the next slots are scored.

    ``weight`` is :math:`\alpha = k\cdot q`, ``abs`` its absolute value, ``contribution`` :math:`c\,\alpha\,(e\cdot u)`.
    ``first`` is the number of the first example. ``weights`` are the scores α of each query row (None where only
    contributions are computed), and ``spare`` is a buffer of the same shape for their absolute values.
    """

    first: int
    blocks: Sequence[Block]
    weights: Float[Tensor, "r m"] | None
    effects: Float[Tensor, "r m"] | None
    """The factors of α in the contributions, or the contributions themselves; None unless they are needed."""
    spare: Float[Tensor, "r m"] | None
    per_example: int
    effects_include_weights: bool = False
    """Whether ``effects`` are the contributions themselves."""
    through_biases: Float[Tensor, "n m"] | None = None
    """The contributions through biases, which are added to those through the weights."""

    def __getitem__(self, score: Score) -> Float[Tensor, "n m"]:
        return {"weight": self._weight, "abs": self._abs, "contribution": self._contribution}[score]()

    @cached_property
    def ids(self) -> Int[np.ndarray, " m"]:
        """The number of each slot in its layer."""
        return self.by_slot(lambda block: block.slots)

    def by_slot(self, values_of: Callable[[Block], np.ndarray]) -> Shaped[np.ndarray, " m"]:
        """The values that a function of blocks gives, for all slots."""
        return np.concatenate([values_of(block) for block in self.blocks])

    def _weight(self) -> Tensor:
        assert self.weights is not None, "a backward scan computes contributions only"
        return self._add(self.weights)

    def _abs(self) -> Tensor:
        return self._absolute

    @cached_property
    def _absolute(self) -> Tensor:
        assert self.weights is not None and self.spare is not None, "a backward scan computes contributions only"
        return self._add(torch.abs(self.weights, out=self.spare))

    def _contribution(self) -> Tensor:
        return self._contributions

    @cached_property
    def _contributions(self) -> Tensor:
        assert self.effects is not None, "contributions need directions"
        if self.effects_include_weights:
            through_weights = self._add(self.effects)
        else:
            assert self.weights is not None
            through_weights = self._add(self.weights * self.effects)
        return through_weights if self.through_biases is None else through_weights + self.through_biases

    def _add(self, scores: Float[Tensor, "r m"]) -> Float[Tensor, "n m"]:
        return scores if self.per_example == 1 else scores.unflatten(0, (-1, self.per_example)).sum(1)


@runtime_checkable
class Reduction(Protocol):
    """A result that is accumulated from one score, block by block."""

    @property
    def score(self) -> Score:
        """The score that it uses."""
        ...

    def add(self, scores: Scores) -> None:
        """Add the scores of more slots."""
        ...


def scan(
    store: Store, layer: str, view: StoreView, queries: LayerQueries, reductions: Sequence[Reduction], *,
    of_step: Sequence[Float[np.ndarray, " T1"]] | None = None, watch: OnProgress | None = None,
) -> None:  # fmt: skip
    """Pass the scores of every visible slot to every reduction.

    Contributions need ``of_step``, the coefficients of each piece of the layer.
    """
    layer_scan = LayerScan(store, layer, queries, reductions, of_step)
    for slots in stream(store, layer, view, errors=layer_scan.contributes, watch=watch):
        layer_scan.take(slots)
    layer_scan.end()


def scan_together(
    store: Store, layer_scans: Sequence["LayerScan"], view: StoreView, watch: OnProgress | None = None
) -> None:
    """Scan several layers side by side: where slots are made by training again, once is enough for all."""
    for layer, slots in stream_together(store, list(dict.fromkeys(each.layer for each in layer_scans)), view, watch):
        for each in layer_scans:
            if each.layer == layer:
                each.take(slots)
    for each in layer_scans:
        each.end()


class LayerScan:
    """The scan of one layer for some queries: takes the layer's slots, block by block.

    Contributions need ``of_step``, the coefficients of each piece of the layer, and ``of_bias``, those of the biases
    that the queries have gradients of.
    """

    def __init__(
        self, store: Store, layer: str, queries: LayerQueries, reductions: Sequence[Reduction],
        of_step: Sequence[Float[np.ndarray, " T1"]] | None = None,
        of_bias: Mapping[str, Float[np.ndarray, " T1"]] | None = None,
    ) -> None:  # fmt: skip
        self.layer, self.reductions = layer, reductions
        self.contributes = any(reduction.score == "contribution" for reduction in reductions)
        self._parts = list(queries.split())
        rows = len(self._parts[0].rows)
        width = max(store.block_rows(layer), ENTRIES // rows if len(self._parts) == 1 else 0)
        info = store.layer(layer)[0]
        self._buffer = ScanBuffer(info, rows, width, store.compute, of_step if self.contributes else None, of_bias)

    def take(self, slots: DecodedSlots) -> None:
        """Multiply more slots with the queries, and reduce the products where there are enough."""
        buffer, parts = self._buffer, self._parts
        if not buffer.fits(slots):
            buffer.reduce(parts[0], 0, self.reductions)
        first = 0
        for part in parts:
            buffer.add(slots, part)
            if len(parts) > 1:
                buffer.reduce(part, first, self.reductions)
            first += len(part)

    def end(self) -> None:
        """All slots were taken."""
        self._buffer.reduce(self._parts[0], 0, self.reductions)


class ScanBuffer:
    """Collects the products of queries with several blocks until there are enough of them for a reduction.

    ``of_step`` are the coefficients of the layer's pieces, if contributions are needed.
    """

    def __init__(
        self, layer: LayerInfo, rows: int, width: int, dtype: torch.dtype, of_step: Sequence[np.ndarray] | None,
        of_bias: Mapping[str, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        self.layer, self.matrix = layer, LayerMatrix(layer)
        self.weights = torch.empty(rows, width, dtype=dtype)
        self.spare = torch.empty_like(self.weights)
        self.effects = None if of_step is None else torch.empty_like(self.weights)
        self.of_step, self.of_bias = of_step, of_bias if of_step is not None else None
        self.through_biases = torch.empty_like(self.weights) if self.of_bias else None
        self.blocks: list[Block] = []
        self.used = 0

    def fits(self, slots: DecodedSlots) -> bool:
        """Whether these slots still fit."""
        return self.used + len(slots.ids) <= self.weights.shape[1]

    def add(self, slots: DecodedSlots, queries: LayerQueries) -> None:
        """Multiply slots with the queries."""
        columns = slice(self.used, self.used + len(slots.ids))
        weights = self.weights[: len(queries.rows), columns]
        self.matrix.weights(slots.keys, queries.rows, weights)
        if slots.block.key_scale is not None:
            weights *= slots.block.key_scale
        if self.effects is not None:
            assert queries.directions is not None and slots.errors is not None and self.of_step is not None
            self._compute_effects(slots, queries.rows, queries.directions, self.effects[: len(queries.rows), columns])
            if self.through_biases is not None:
                self._compute_through_biases(slots, queries, self.through_biases[: len(queries), columns])
        self.blocks.append(slots.block.without_rows())
        self.used = columns.stop

    def _compute_effects(
        self, slots: DecodedSlots, rows: Tensor, directions: Tensor, out: Float[Tensor, "r m"]
    ) -> None:  # fmt: skip
        """The effect of each slot on the target: whole contributions if the layer has several pieces or parts."""
        assert slots.errors is not None and self.of_step is not None
        if len(self.of_step) == 1 and self.layer.parts == 1:
            torch.mm(directions, slots.errors.mT, out=out).mul_(slots.values(self.of_step[0]))
            return
        out.zero_()
        for piece, of_piece in zip(self.layer.pieces, self.of_step, strict=True):
            value = slots.values(of_piece)
            if slots.block.key_scale is not None:
                value = value * slots.block.key_scale
            for columns, e in self.matrix.piece_parts(piece):
                out += (
                    (rows[:, columns] @ slots.keys[:, columns].mT) * (directions[:, e] @ slots.errors[:, e].mT) * value
                )

    def _compute_through_biases(
        self, slots: DecodedSlots, queries: LayerQueries, out: Float[Tensor, "n m"]
    ) -> None:  # fmt: skip
        assert slots.errors is not None and self.of_bias is not None
        out.zero_()
        for name, gradient in queries.biases.items():
            out += (gradient @ slots.errors.mT) * slots.values_in_bias(name, self.of_bias[name])

    def reduce(self, queries: LayerQueries, first: int, reductions: Sequence[Reduction]) -> None:
        """Pass the collected scores to the reductions, and clear the buffer."""
        if not self.used:
            return
        used = (slice(len(queries.rows)), slice(self.used))
        effects = None if self.effects is None else self.effects[used]
        include_weights = len(self.of_step or ()) > 1 or self.layer.parts > 1
        through_biases = None if self.through_biases is None else self.through_biases[: len(queries), : self.used]
        scores = Scores(
            first, self.blocks, self.weights[used], effects, self.spare[used], queries.per_example, include_weights,
            through_biases,
        )  # fmt: skip
        for reduction in reductions:
            reduction.add(scores)
        self.blocks, self.used = [], 0
