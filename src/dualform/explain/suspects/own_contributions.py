"""What each training example put into a number about itself: only the diagonal of examples against examples."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.engine import (
    LayerQueries,
    StoreView,
    backward_factors,
    coefficients,
    decoded,
    factor_matrix,
    scaled_errors,
    stream,
)
from dualform.errors import QueryError
from dualform.progress import OnProgress
from dualform.store import Block, LayerMatrix, Store
from dualform.types import LayerInfo

from ..query import is_preconditioned

ENTRIES = 1 << 23
"""How many numbers of query rows are laid beside slots at a time."""


def own_contributions(
    store: Store, view: StoreView, layer: LayerInfo, queries: LayerQueries, row_of_visit: Int[np.ndarray, " V1"],
    watch: OnProgress | None,
) -> Float[Tensor, " n"]:  # fmt: skip
    r"""For each query i the sum of :math:`c_t (e_t \cdot u_i)(x_t \cdot q_i)` over the slots t of its own visits.

    ``row_of_visit`` is the query that each visit belongs to (−1: none; the last entry is for unknown visits). The cost
    is one pass over the slots, however many queries there are.
    """
    diagonal = _Diagonal(layer, queries)
    if is_preconditioned(store, layer):
        _require_entries(store, layer)
        for step, factors in backward_factors(store, layer.weights, view.horizon):
            block = store.step_block(layer.name, step)
            if block is None:
                continue
            if watch:
                watch(len(block.slots))
            kept = _kept(block, view, row_of_visit)
            if not len(kept) or not factors:
                continue
            slots, factor = decoded(block.take(kept), store.compute), factor_matrix(store, layer, factors)
            diagonal.add_through(factor, slots.keys, scaled_errors(slots), row_of_visit[slots.block.visits])
        return diagonal.total
    of_step = [coefficients(store, piece.parameter, view.horizon).of_step for piece in layer.pieces]
    for slots in stream(store, layer.name, view, errors=True, watch=watch):
        kept = _kept(slots.block, view, row_of_visit)
        if not len(kept):
            continue
        slots = slots.take(kept)
        assert slots.errors is not None
        scale = 1.0 if slots.block.key_scale is None else slots.block.key_scale
        values = [slots.values(of_piece) * scale for of_piece in of_step]
        diagonal.add(values, slots.keys, slots.errors, row_of_visit[slots.block.visits])
    return diagonal.total


class _Diagonal:
    """The sum for each query over the slots that belong to it."""

    def __init__(self, layer: LayerInfo, queries: LayerQueries) -> None:
        assert queries.directions is not None
        self.layer, self.matrix = layer, LayerMatrix(layer)
        self.rows = queries.rows.unflatten(0, (-1, queries.per_example))
        self.directions = queries.directions.unflatten(0, (-1, queries.per_example))
        self.total = torch.zeros(len(queries), dtype=torch.float64)
        self.size = max(1, ENTRIES // (queries.per_example * (self.rows.shape[2] + self.directions.shape[2])))

    def add(
        self, values: Sequence[Float[Tensor, " m"]], keys: Tensor, errors: Tensor, owners: Int[np.ndarray, " m"]
    ) -> None:
        """Add slots with a number as coefficient, one for each piece of the layer's matrix."""
        for part, (q, u, owner) in self._parts(owners):
            k, e = keys[part], errors[part]
            sums = torch.zeros(len(k), dtype=errors.dtype)
            for piece, value in zip(self.layer.pieces, values, strict=True):
                for columns, outputs in self.matrix.piece_parts(piece):
                    alpha = self._weights(k[:, columns], q[..., columns])
                    pull = torch.einsum("mro,mo->mr", u[..., outputs], e[:, outputs])
                    sums += (alpha * pull).sum(1) * value[part]
            self.total.index_add_(0, owner, sums.double())

    def add_through(self, factor: Float[Tensor, "d_out w"], keys: Tensor, errors: Tensor, owners: np.ndarray) -> None:
        """Add slots of a step in which every entry of the matrix has a coefficient of its own."""
        for part, (q, u, owner) in self._parts(owners):
            k, e = keys[part], errors[part]
            pull = u * e.unsqueeze(1)  # m r d_out
            if self.layer.indexed:
                column = factor.mT[k[:, 0].long()].unsqueeze(1)
                sums = ((pull * column).sum(2) * self._weights(k, q)).sum(1)
            else:
                sums = (pull * ((q * k.unsqueeze(1)) @ factor.mT)).sum((1, 2))
            self.total.index_add_(0, owner, sums.double())

    def _parts(self, owners: Int[np.ndarray, " m"]):
        """Some slots at a time: which ones, the rows and directions of their queries, and the queries' numbers."""
        for begin in range(0, len(owners), self.size):
            part = slice(begin, begin + self.size)
            owner = torch.from_numpy(owners[part])
            yield part, (self.rows[owner], self.directions[owner], owner)

    def _weights(self, keys: Tensor, rows: Tensor) -> Float[Tensor, "m r"]:
        if self.layer.indexed:
            return (rows[..., 0] == keys[:, :1]).to(self.directions.dtype)
        return torch.einsum("mrk,mk->mr", rows, keys)


def _kept(block: Block, view: StoreView, row_of_visit: np.ndarray) -> Int[np.ndarray, " k"]:
    """The rows of a block whose visit is shown and belongs to a query."""
    shown = row_of_visit[block.visits] >= 0
    if view.visible is not None:
        shown &= np.append(view.visible, True)[block.visits]
    return np.flatnonzero(shown)


def _require_entries(store: Store, layer: LayerInfo) -> None:
    """Raise where a slot's coefficient is not one number an entry of the layer's matrix."""
    rules = [rule for name in layer.weights if (rule := store.rule(name)) is not None]
    if layer.parts > 1 or any(rule.acts == "left" for rule in rules):
        raise QueryError(
            f"what examples put into layer '{layer.name}' for themselves is not known for a grouped convolution under "
            "Adam and its like, nor under Muon. Choose another layer=, or ask memory.attend(…) about a few examples."
        )
