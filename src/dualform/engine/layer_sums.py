"""The sums over the slots of one layer that rebuild its parameters, for rules with scalar coefficients."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.store import LayerMatrix, Store, piece_slices
from dualform.types import LayerInfo

from .coefficients import coefficients
from .parameter_sums import ParameterSum
from .stream import StoreView, stream


def explained_layers(store: Store) -> Iterator[LayerInfo]:
    """The layers whose slots rebuild at least one parameter."""
    for layer in store.manifest.layers:
        if any(store.parameters[name].by_slots for name in layer.parameters):
            yield layer


def layers_by_pass(store: Store, layers: Iterable[LayerInfo]) -> list[list[LayerInfo]]:
    """The layers whose slots are read in one pass: each by itself, or all together where a pass runs training again."""
    layers = list(layers)
    if store.is_supplied:
        return [layers] if layers else []
    return [[layer] for layer in layers]


def layer_sums(
    store: Store, layer: LayerInfo, horizon: int, *, quantity: str = "weight", **options: Any
) -> dict[str, ParameterSum]:  # fmt: skip
    """The sums over the slots of a layer that rebuild its weights and biases; options go to :class:`ParameterSum`.

    ``quantity="buffer"`` rebuilds the optimiser's buffers instead.
    """
    return {
        name: ParameterSum(layer, name, coefficients(store, name, horizon, quantity).of_step, **options)
        for name in layer.parameters
        if store.parameters[name].by_slots and not store.is_preconditioned(name)
    }


def initial_part(store: Store, name: str, horizon: int, quantity: str = "weight") -> Float[Tensor, "..."]:
    r"""What is left of the initial state at the horizon: :math:`\rho W_0 + \gamma M_0`, in float64."""
    c = coefficients(store, name, horizon, quantity)
    part = c.rho * store.initial(name).double()
    buffer = store.initial_state(name, "buffer")
    return part if buffer is None else part + c.gamma * buffer.double()


def parameter_entries(
    store: Store, layer: LayerInfo, name: str, view: StoreView, entries: Int[np.ndarray, " k"]
) -> Float[Tensor, " k"]:
    """The sum over slots for single entries of a weight; ``entries`` are indices into the flattened parameter."""
    of_step = coefficients(store, name, view.horizon).of_step
    rows, columns = (torch.from_numpy(indices) for indices in piece_slices(layer, name, entries))
    matrix, total = LayerMatrix(layer), torch.zeros(len(entries), dtype=torch.float64)
    for slots in stream(store, layer.name, view, errors=True):
        assert slots.errors is not None
        value = slots.values(of_step).double()
        if slots.block.key_scale is not None:
            value = value * slots.block.key_scale
        e = slots.errors[:, rows].double() * value.unsqueeze(1)
        x = matrix.key_columns(slots.keys, columns)
        total += (e * x).sum(0)
    return total
