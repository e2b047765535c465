"""Contributions under a preconditioned rule: a sweep over the steps, from the last one down.

A slot has no scalar coefficient there, but a matrix C of the shape of the weights, a different one at each step:

.. math:: \\text{contribution of slot } t = e_t^\\top (C_s \\odot u q^\\top)\\, x_t

for a query q and the gradient u of the target. For each step, C costs one product of the size of a weight gradient,
and so does each query.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualform.progress import OnProgress
from dualform.store import LayerMatrix, Store, assemble_matrix
from dualform.types import LayerInfo

from ..scan import LayerQueries, Reduction, Scores
from ..stream import DecodedSlots, StoreView, decoded
from .backward_factors import Factor, backward_factors

TARGETS = 1 << 24
"""The number of entries (queries × weights) that are in memory at a time."""


def scan_backwards(
    store: Store,
    layer: str,
    view: StoreView,
    queries: LayerQueries,
    reductions: Sequence[Reduction],
    watch: OnProgress | None = None,
) -> None:
    """Pass the contribution of every visible slot to every reduction, the last step first."""
    info, _ = store.layer(layer)
    targets = list(_matrix_gradients(info, queries))
    for step, factors in backward_factors(store, info, view.horizon):
        block = store.step_block(layer, step)
        if block is None:
            continue
        if watch:
            watch(len(block.slots))
        if view.visible is not None:
            shown = np.append(view.visible, True)[block.visits]
            block = block if shown.all() else block.take(np.flatnonzero(shown))
        if not len(block.slots) or not factors:
            continue
        slots = decoded(block, store.compute)
        first = 0
        for target in targets:
            contributions = _contributions(store, info, slots, factors, target)
            scores = Scores(first, [block], None, contributions, None, 1, effects_include_weights=True)
            for reduction in reductions:
                reduction.add(scores)
            first += len(target)


def _matrix_gradients(layer: LayerInfo, queries: LayerQueries) -> Iterator[Float[Tensor, "n d_out w"]]:
    """The gradient of each example's target with respect to the layer's matrix: the sum of u qᵀ over its rows.

    They come in batches of examples.
    """
    assert queries.directions is not None
    rows, directions = (t.unflatten(0, (-1, queries.per_example)) for t in (queries.rows, queries.directions))
    size = max(1, TARGETS // (layer.d_out * layer.width))
    for q, u in zip(rows.split(size), directions.split(size), strict=True):
        yield LayerMatrix(layer).outer(q, u)


def _contributions(
    store: Store, layer: LayerInfo, slots: DecodedSlots, factors: dict[str, Factor], target: Float[Tensor, "n d_out w"]
) -> Float[Tensor, "n m"]:
    assert slots.errors is not None
    value = slots.factors(layer.weights[0])
    if slots.block.key_scale is not None:
        value = value * slots.block.key_scale
    errors = slots.errors * value.unsqueeze(1)
    if any((rule := store.rule(name)) is not None and rule.acts == "left" for name in layer.weights):
        return _through_matrices(layer, slots.keys, errors, factors, target)
    matrices = {name: _full_matrix(store, name, factors.get(name, 0.0)) for name in layer.weights}
    target = target * assemble_matrix(layer, matrices)
    return LayerMatrix(layer).bilinear(target, slots.keys, errors)


def _through_matrices(
    layer: LayerInfo,
    keys: Float[Tensor, "m d_in"],
    errors: Float[Tensor, "m d_out"],
    factors: dict[str, Factor],
    target: Float[Tensor, "n d_out w"],
) -> Float[Tensor, "n m"]:
    """Contributions where C multiplies a parameter from the left: it is applied to the errors, or to the keys if the
    parameter is transposed.
    """
    out = errors.new_zeros(len(target), len(errors))
    for piece in layer.pieces:
        e, x, c = errors, keys[:, piece.begin : piece.end], factors.get(piece.parameter, 0.0)
        if not isinstance(c, Tensor):
            e = e * c
        elif piece.transposed:
            x = x @ c.mT
        else:
            e = e @ c.mT
        out += torch.einsum("nmw,mw->nm", e @ target[:, :, piece.begin : piece.end], x)
    return out


def _full_matrix(store: Store, name: str, factor: Factor) -> Tensor:
    if isinstance(factor, Tensor):
        return factor
    return torch.full(store.parameters[name].shape, factor, dtype=store.compute)
