r"""The slots of one step as the gradients of its examples.

The gradient of example i in the matrix of a layer is :math:`G_i = \sum_r e_r [k_r, 1]^\top` over its slots (tokens,
pixels, several calls). Each bias is one more column of the matrix, with the key 1 where a slot's module has that bias.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.store import Block, LayerMatrix, Store
from dualform.types import LayerInfo

from ..stream import decoded

ENTRIES = 1 << 24
"""The most entries of gradients that are in memory at a time."""


@dataclass(frozen=True)
class ExampleRows:
    """Decoded slots of one layer in one step, scaled as in the gradient."""

    layer: LayerInfo
    keys: Shaped[Tensor, "m k"]
    bias_keys: Float[Tensor, "m biases"]
    errors: Float[Tensor, "m d_out"]
    visits: Int[np.ndarray, " m"]

    @property
    def examples(self) -> int:
        """The number of examples that the rows belong to."""
        return len(np.unique(self.visits))

    @property
    def extended_keys(self) -> Float[Tensor, "m c"]:
        """The keys with the columns of the biases."""
        return torch.cat([self.keys, self.bias_keys], 1)


def rows_of_steps(store: Store, layer: LayerInfo, steps: Iterable[int]) -> Iterator[ExampleRows]:
    """The slots of a layer, step by step."""
    for step in steps:
        block = store.step_block(layer.name, step)
        if block is not None:
            slots, calls = decoded(block, store.compute), block.calls
            assert slots.errors is not None
            scale = torch.from_numpy(calls.factor[block.call]).to(slots.errors)  # 0 where the weight is frozen
            errors = slots.errors if block.error_scale is None else slots.errors * block.error_scale.unsqueeze(1)
            if layer.indexed:
                keys, errors = block.keys, errors * scale.unsqueeze(1)
            else:
                keys = slots.keys * (scale if block.key_scale is None else scale * block.key_scale).unsqueeze(1)
            yield ExampleRows(layer, keys, _bias_keys(layer, block).to(errors), errors, block.visits)


def _bias_keys(layer: LayerInfo, block: Block) -> Float[Tensor, "m biases"]:
    """For each bias of the layer 1 where the module of a slot adds it and it is trained, else 0."""
    has_bias = np.array([[bias in use.biases for bias in layer.biases] for use in layer.modules], np.float64)
    added = has_bias.reshape(len(layer.modules), -1)[block.calls.module[block.call]]
    return torch.from_numpy(added * block.calls.bias_factor[block.call, None])


def example_gradients(rows: ExampleRows) -> Iterator[tuple[Int[np.ndarray, " n"], Float[Tensor, "n d_out c"]]]:
    """The visits of a step and the gradient of each, some examples at a time."""
    layer = rows.layer
    examples, example_of_row, counts = np.unique(rows.visits, return_inverse=True, return_counts=True)
    order = np.argsort(example_of_row, kind="stable")
    begins = np.cumsum(counts) - counts
    longest = int(counts.max())
    matrix, width = LayerMatrix(layer), layer.width + rows.bias_keys.shape[1]
    size = max(1, ENTRIES // max(layer.d_out * width, longest * (layer.key_size + layer.d_out)))
    for first in range(0, len(examples), size):
        chosen = slice(first, first + size)
        place = np.arange(longest)
        inside = torch.from_numpy(place < counts[chosen, None])
        row = torch.from_numpy(order[np.where(inside.numpy(), begins[chosen, None] + place, 0)])
        errors = rows.errors[row] * inside.unsqueeze(2)  # rows beside an example count nothing
        weights = matrix.outer(rows.keys[row], errors)
        yield examples[chosen], torch.cat([weights, errors.mT @ rows.bias_keys[row]], 2)
