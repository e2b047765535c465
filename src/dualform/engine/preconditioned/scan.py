"""Contributions under a preconditioned rule: a sweep over the steps, from the last one down.

A slot has no scalar coefficient there, but a matrix C of the shape of the weights, a different one at each step:

.. math:: \\text{contribution of slot } t = e_t^\\top (C_s \\odot u q^\\top)\\, x_t

for a query q and the gradient u of the target. For each step, C costs one product of the size of a weight gradient,
and so does each query.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class LayerTargets:
    """Of some examples, the gradients of the target with respect to a layer's matrix and to its biases."""

    layer: LayerInfo
    first: int
    """The number of the first example."""
    matrix: Float[Tensor, "n d_out w"]
    biases: Mapping[str, Float[Tensor, "n d_out"]]


def scan_backwards(
    store: Store,
    asked: Sequence[tuple[str, LayerQueries]],
    view: StoreView,
    reductions: Sequence[Reduction],
    watch: OnProgress | None = None,
    initial: MutableMapping[str, tuple[Factor, Factor]] | None = None,
) -> None:
    """Pass the contribution of every visible slot to every reduction, the last step first.

    ``asked`` are layers, and what is asked of each: one sweep is enough for all of them. ``initial`` comes to hold the
    factors of the first state of their parameters.
    """
    targets: dict[str, list[LayerTargets]] = {}
    for layer, queries in asked:
        info, _ = store.layer(layer)
        targets.setdefault(info.name, []).extend(layer_targets(info, queries))
    for layer, slots, factors in slots_backwards(store, asked, view, watch, initial):
        for target in targets[layer]:
            contributions = contributions_to(store, slots, factors, target)
            scores = Scores(target.first, [slots.block], None, contributions, None, 1, effects_include_weights=True)
            for reduction in reductions:
                reduction.add(scores)


def slots_backwards(
    store: Store,
    asked: Sequence[tuple[str, LayerQueries]],
    view: StoreView,
    watch: OnProgress | None = None,
    initial: MutableMapping[str, tuple[Factor, Factor]] | None = None,
) -> Iterator[tuple[str, DecodedSlots, Mapping[str, Factor]]]:
    """The visible slots of some layers, the last step first, with the factors of their step in what is asked."""
    layers: dict[str, None] = {}
    names: dict[str, None] = {}
    for layer, queries in asked:
        info, _ = store.layer(layer)
        layers[info.name] = None
        names |= dict.fromkeys((*info.weights, *queries.biases))
    for step, factors in backward_factors(store, names, view.horizon, initial):
        for layer in layers:
            slots = _visible_slots(store, layer, step, view, watch)
            if slots is not None and factors:
                yield layer, slots, factors


def _visible_slots(
    store: Store, layer: str, step: int, view: StoreView, watch: OnProgress | None
) -> DecodedSlots | None:  # fmt: skip
    block = store.step_block(layer, step)
    if block is None:
        return None
    if watch:
        watch(len(block.slots))
    if view.visible is not None:
        shown = np.append(view.visible, True)[block.visits]
        block = block if shown.all() else block.take(np.flatnonzero(shown))
    return decoded(block, store.compute) if len(block.slots) else None


def layer_targets(layer: LayerInfo, queries: LayerQueries) -> Iterator[LayerTargets]:
    """The gradient of each example's target with respect to the layer's matrix: the sum of u qᵀ over its rows.

    They come in batches of examples.
    """
    assert queries.directions is not None
    rows, directions = (t.unflatten(0, (-1, queries.per_example)) for t in (queries.rows, queries.directions))
    size = max(1, TARGETS // (layer.d_out * layer.width))
    for first in range(0, len(rows), size):
        part = slice(first, first + size)
        biases = {name: gradient[part] for name, gradient in queries.biases.items()}
        yield LayerTargets(layer, first, LayerMatrix(layer).outer(rows[part], directions[part]), biases)


def contributions_to(
    store: Store, slots: DecodedSlots, factors: Mapping[str, Factor], target: LayerTargets
) -> Float[Tensor, "n m"]:
    """The contributions of slots to some targets, given the factors of their step."""
    assert slots.errors is not None
    layer = target.layer
    errors = scaled_errors(slots)
    if multiplies_from_left(store, layer):
        out = _through_matrices(layer, slots.keys, errors, factors, target.matrix)
    else:
        out = LayerMatrix(layer).bilinear(target.matrix * factor_matrix(store, layer, factors), slots.keys, errors)
    for name, gradient in target.biases.items():
        out += (gradient * factors.get(name, 0.0)) @ (slots.errors * slots.factors(name).unsqueeze(1)).mT
    return out


def multiplies_from_left(store: Store, layer: LayerInfo) -> bool:
    """Whether factors are matrices that multiply a parameter of a layer, and not numbers for each of its entries."""
    return any((rule := store.rule(name)) is not None and rule.acts == "left" for name in layer.weights)


def _through_matrices(
    layer: LayerInfo,
    keys: Float[Tensor, "m d_in"],
    errors: Float[Tensor, "m d_out"],
    factors: Mapping[str, Factor],
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


def scaled_errors(slots: DecodedSlots) -> Float[Tensor, "m d_out"]:
    """The errors of slots as they stand beside their keys in a layer's gradient, times all factors."""
    assert slots.errors is not None
    value = slots.factors(slots.block.layer.weights[0])
    if slots.block.key_scale is not None:
        value = value * slots.block.key_scale
    return slots.errors * value.unsqueeze(1)


def factor_matrix(store: Store, layer: LayerInfo, factors: Mapping[str, Factor]) -> Float[Tensor, "d_out w"]:
    """The factor of each entry of a layer's matrix, where rules work entry by entry."""

    def full(name: str) -> Tensor:
        factor = factors.get(name, 0.0)
        if isinstance(factor, Tensor):
            return factor
        return torch.full(store.parameters[name].shape, factor, dtype=store.compute)

    return assemble_matrix(layer, {name: full(name) for name in layer.weights})
