r"""How much each visit put into a layer: :math:`\sum |c_t|\,\lVert e_t\rVert\,\lVert x_t\rVert` over its slots.

For a visit with one slot this is the norm of its part of the weights, otherwise a bound of it. If a map has several
pieces (the two sides of an LSTM) or parts (a grouped convolution) it is the norm over all of them.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.engine import StoreView, coefficients, stream
from dualform.errors import QueryError
from dualform.progress import OnProgress
from dualform.store import LayerMatrix, Store

from ..query import is_preconditioned


def visit_sizes(store: Store, view: StoreView, layer: str, watch: OnProgress | None = None) -> Float[Tensor, " V"]:
    """The size of each visit of the memory; 0 for visits that the view does not show."""
    info, _ = store.layer(layer)
    if (
        info.keep != "slots"
        or info.indexed
        or is_preconditioned(store, info)
        or not store.parameters[info.weights[0]].by_slots
    ):
        raise QueryError(
            f"the visits' parts of layer '{layer}' have no sizes: they need slots of a layer that is no embedding, and "
            "an optimiser of the SGD family, where each slot has one coefficient."
        )
    total = torch.zeros(len(store.visits) + 1, dtype=torch.float64)
    of_step = [(piece, coefficients(store, piece.parameter, view.horizon).of_step) for piece in info.pieces]
    for slots in stream(store, layer, view, errors=True, watch=watch):
        assert slots.errors is not None
        keys, errors = slots.keys.double(), slots.errors.double()
        square = torch.zeros(len(keys), dtype=torch.float64)
        for piece, coefficient in of_step:
            value = slots.values(coefficient).double().square()
            for k, e in LayerMatrix(info).piece_parts(piece):
                key = keys[:, k]
                square += value * errors[:, e].square().sum(1) * key.square().sum(1)
        size, scale = square.sqrt(), slots.block.key_scale
        visits = torch.from_numpy(slots.block.visits) % len(total)  # −1 (unknown) goes to the last entry
        total.index_add_(0, visits, size if scale is None else size * scale)
    return total[:-1]
