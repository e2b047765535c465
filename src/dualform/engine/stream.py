"""The slots of a layer as a stream of decoded blocks: every scan and every sum is a loop over it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dualform.progress import OnProgress
from dualform.store import Block, Store, ViewKey


@dataclass(frozen=True)
class StoreView:
    """The part of a memory that is read: the steps up to the horizon, and the visible visits (None: all of them).

    Slots of unknown visits are always visible.
    """

    horizon: int
    visible: Bool[np.ndarray, " V"] | None = None

    @property
    def key(self) -> ViewKey:
        """A key for caches: equal for views with the same horizon and mask."""
        return self.horizon, None if self.visible is None else np.packbits(self.visible).tobytes()


@dataclass(frozen=True)
class DecodedSlots:
    """Slots of a layer, decoded for computing. The tensors are valid until the next block is decoded."""

    block: Block
    keys: Float[Tensor, "m d_in"]
    errors: Float[Tensor, "m d_out"] | None

    @property
    def ids(self) -> Int[np.ndarray, " m"]:
        """The number of each slot in its layer."""
        return self.block.slots

    def modules_among(self, modules: Sequence[int]) -> Bool[np.ndarray, " m"]:
        """Whether each slot comes from one of these modules of its layer."""
        return np.isin(self.block.calls.module[self.block.call], modules)

    def take(self, rows: Int[np.ndarray, " k"]) -> "DecodedSlots":
        """Only these rows."""
        index = torch.from_numpy(rows)
        errors = None if self.errors is None else self.errors[index]
        return DecodedSlots(self.block.take(rows), self.keys[index], errors)

    def factors(self, parameter: str) -> Float[Tensor, " m"]:
        """The factor of each slot's error in the gradient of a parameter, times the power of two of its encoding."""
        calls, call, layer = self.block.calls, self.block.call, self.block.layer
        if parameter in layer.weights:
            factor = calls.factor[call]
        else:
            users = [i for i, module in enumerate(layer.modules) if parameter in module.biases]
            factor = calls.bias_factor[call] * self.modules_among(users)
        value = torch.from_numpy(factor).to(self.keys.dtype)
        return value if self.block.error_scale is None else value.mul_(self.block.error_scale)

    def values(self, of_step: Float[np.ndarray, " T1"], bias: bool = False) -> Float[Tensor, " m"]:
        """The factor of each slot's error in a sum: its coefficient times the power of two of its encoding."""
        value = torch.from_numpy(self.block.coefficients(of_step, bias)).to(self.keys.dtype)
        return value if self.block.error_scale is None else value.mul_(self.block.error_scale)

    def values_in_bias(self, name: str, of_step: Float[np.ndarray, " T1"]) -> Float[Tensor, " m"]:
        """The same for one bias of the layer: 0 for slots of modules that do not have it."""
        users = [i for i, module in enumerate(self.block.layer.modules) if name in module.biases]
        value = self.values(of_step, bias=True)
        if len(users) < len(self.block.layer.modules):
            value *= torch.from_numpy(self.modules_among(users))
        return value


def stream(
    store: Store, layer: str, view: StoreView, *, errors: bool, watch: OnProgress | None = None
) -> Iterator[DecodedSlots]:
    """The visible slots of a layer, block by block, in the order of training."""
    info, _ = store.layer(layer)
    everything_visible = view.visible is None and view.horizon >= store.steps
    rows = store.block_rows(info.name)
    key_buffer = torch.empty(rows, info.key_size, dtype=store.compute)
    error_buffer = torch.empty(rows if errors else 0, info.d_out, dtype=store.compute)
    passed = 0
    for block in store.blocks(info.name, errors=errors, upto=view.horizon, visible=view.visible):
        end = int(block.slots[-1]) + 1
        shown = None if everything_visible else _visible_rows(block, view)
        if shown is not None:
            block = block.take(shown)
        if len(block.slots):
            yield DecodedSlots(
                block,
                _decode(block.keys, key_buffer),
                None if block.errors is None else _decode(block.errors, error_buffer),
            )
        if watch:
            watch(end - passed)
        passed = end


def stream_together(
    store: Store, layers: Sequence[str], view: StoreView, watch: OnProgress | None = None
) -> Iterator[tuple[str, DecodedSlots]]:
    """The visible slots of several layers, side by side through the training: each shard is needed only once."""
    streams = {layer: stream(store, layer, view, errors=True, watch=watch) for layer in layers}
    steps = dict.fromkeys(layers, 0)
    while steps:
        layer = min(steps, key=steps.__getitem__)
        slots = next(streams[layer], None)
        if slots is None:
            del steps[layer]
            continue
        steps[layer] = int(slots.block.steps[-1])
        yield layer, slots


def decoded(block: Block, dtype: torch.dtype) -> DecodedSlots:
    """A block, decoded for computing."""
    return DecodedSlots(block, block.keys.to(dtype), None if block.errors is None else block.errors.to(dtype))


def _visible_rows(block: Block, view: StoreView) -> np.ndarray | None:
    shown = block.steps <= view.horizon
    if view.visible is not None:
        shown &= np.append(view.visible, True)[block.visits]  # −1, unknown, is the index of the last entry
    return None if shown.all() else np.flatnonzero(shown)


def _decode(stored: Tensor, buffer: Tensor) -> Tensor:
    if stored.dtype == buffer.dtype:
        return stored
    out = buffer[: stored.shape[0]]
    out.copy_(stored)
    return out
