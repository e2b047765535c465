r"""Sums of contributions under a preconditioned rule, apart for every row of the queries.

A row with the input q and the gradient u gets from a group g of the slots of a step

.. math:: u^\top (C_s \odot G^g)\, q,\qquad G^g = \sum_{t \in g} e_t x_t^\top

so the gradient of the group is multiplied with the factors of the step once for all rows.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualform.progress import OnProgress
from dualform.store import LayerMatrix, Store
from dualform.types import LayerInfo

from ..row_sums import RowSums
from ..scan import LayerQueries
from ..stream import DecodedSlots, StoreView
from .backward_factors import Factor
from .scan import contributions_to, factor_matrix, layer_targets, multiplies_from_left, scaled_errors, slots_backwards


def row_sums_backwards(
    store: Store, asked: Sequence[tuple[str, LayerQueries, RowSums]], view: StoreView, watch: OnProgress | None = None
) -> None:
    """Add the contributions of all visible slots to the sums of what is asked of their layer, in one sweep."""
    questions = [(layer, queries) for layer, queries, _ in asked]
    wholes = [next(iter(layer_targets(store.layer(layer)[0], _all_rows(queries)))) for layer, queries in questions]
    for layer, slots, factors in slots_backwards(store, questions, view, watch):
        for (name, queries, sums), whole in zip(asked, wholes, strict=True):
            if name != layer:
                continue
            groups, places = sums.group_of(slots.block), sums.place_of(slots.block)
            contributions = contributions_to(store, slots, factors, whole)[0].double()
            sums.by_place.index_add_(0, torch.from_numpy(places), contributions)
            for group in np.unique(groups).tolist():
                members = slots if (groups == group).all() else slots.take(np.flatnonzero(groups == group))
                sums.by_row[:, group] += _through_rows(store, whole.layer, members, factors, queries)


def _all_rows(queries: LayerQueries) -> LayerQueries:
    """The same rows as those of one example."""
    biases = {name: gradient.sum(0, keepdim=True) for name, gradient in queries.biases.items()}
    return LayerQueries(queries.rows, queries.directions, len(queries.rows), biases)


def _through_rows(
    store: Store, layer: LayerInfo, slots: DecodedSlots, factors: Mapping[str, Factor], queries: LayerQueries
) -> Float[Tensor, " r"]:
    """What some slots of one step add through each row."""
    assert slots.errors is not None and queries.directions is not None
    gradient = LayerMatrix(layer).outer(slots.keys.unsqueeze(0), scaled_errors(slots).unsqueeze(0))[0]
    part = _times_factors(store, layer, gradient, factors)
    is_written_out = layer.indexed and queries.rows.shape[1] > 1
    outputs = queries.rows @ part.mT if is_written_out else LayerMatrix(layer).apply(part, queries.rows)
    contributions = (queries.directions * outputs).sum(1)
    for name, directions in queries.biases.items():
        error = (slots.errors * slots.factors(name).unsqueeze(1)).sum(0)
        contributions = contributions + directions @ (error * factors.get(name, 0.0))
    return contributions.double()


def _times_factors(
    store: Store, layer: LayerInfo, gradient: Float[Tensor, "d_out w"], factors: Mapping[str, Factor]
) -> Float[Tensor, "d_out w"]:
    """What a gradient of a layer's matrix at some step has become in the matrix at the horizon."""
    if not multiplies_from_left(store, layer):
        return gradient * factor_matrix(store, layer, factors)
    pieces = []
    for piece in layer.pieces:
        columns, factor = gradient[:, piece.begin : piece.end], factors.get(piece.parameter, 0.0)
        if not isinstance(factor, Tensor):
            pieces.append(columns * factor)
        else:
            pieces.append(columns @ factor.mT if piece.transposed else factor @ columns)
    return torch.cat(pieces, 1)
