"""The gradient of a parameter at a step, from the slots of that step: whole, or split by groups of slots."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.store import Block, LayerMatrix, Store
from dualform.types import LayerInfo

from ..stream import DecodedSlots, decoded

SlotGroups = Callable[[Block], Int[np.ndarray, " m"]]
"""The group of each slot of a block; −1 for slots that are in none."""


class SlotGradients:
    """The gradients of parameters at single steps, computed from slots."""

    def __init__(self, store: Store, names: Iterable[str]) -> None:
        self.store, self.names = store, tuple(names)
        self.layers = [layer for layer in store.manifest.layers if set(layer.parameters) & set(self.names)]

    def at(self, step: int) -> Iterator[tuple[LayerInfo, DecodedSlots]]:
        """The slots of a step, layer by layer."""
        for layer in self.layers:
            block = self.store.step_block(layer.name, step)
            if block is not None:
                yield layer, decoded(block, self.store.compute)

    def total(self, step: int) -> dict[str, Tensor]:
        """The total gradient of each parameter."""
        out = {name: self._zeros(name) for name in self.names}
        for layer, slots in self.at(step):
            for name in layer.parameters:
                if name in out:
                    out[name] += gradient_of(layer, name, slots, self._shape(name))
        return out

    def split(self, step: int, group_of: SlotGroups, groups: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The total gradient of each parameter, and its parts: zeros for the initial state, then one for each group."""
        totals = {name: self._zeros(name) for name in self.names}
        parts = {name: self._zeros(name, 1 + groups) for name in self.names}
        for layer, slots in self.at(step):
            group = group_of(slots.block)
            for number in np.unique(group):
                members = slots if (group == number).all() else slots.take(np.flatnonzero(group == number))
                for name in layer.parameters:
                    if name in totals:
                        part = gradient_of(layer, name, members, self._shape(name))
                        totals[name] += part
                        if number >= 0:
                            parts[name][1 + number] += part
        return totals, parts

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.store.parameters[name].shape

    def _zeros(self, name: str, *before: int) -> Tensor:
        return torch.zeros(*before, *self._shape(name), dtype=self.store.compute)


def gradient_of(layer: LayerInfo, name: str, slots: DecodedSlots, shape: Sequence[int]) -> Float[Tensor, "..."]:
    """The gradient of a parameter of a layer from slots of that layer."""
    assert slots.errors is not None
    value = slots.factors(name)
    if name not in layer.weights:
        return _bias_gradient(slots, value)
    if slots.block.key_scale is not None:
        value = value * slots.block.key_scale
    return LayerMatrix(layer).gradient(name, slots.keys, slots.errors * value.unsqueeze(1), shape)


def _bias_gradient(slots: DecodedSlots, value: Float[Tensor, " m"]) -> Float[Tensor, " d_out"]:
    """The gradient of a bias, added up in the order of autograd: call by call, row by row.

    A gradient may be zero except for the rounding error of this sum (the key bias of attention) and still change its
    bias, if the rule divides by the size of the gradient.
    """
    assert slots.errors is not None
    _, sizes = np.unique(slots.block.call, return_counts=True)
    total, *gradients = [rows.sum(0) for rows in (slots.errors * value.unsqueeze(1)).split(sizes.tolist())]
    for gradient in gradients:
        total += gradient
    return total
