"""The slots of a layer as a stream of decoded blocks: every question is a loop over it."""

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
    """What of a memory is read: up to which step, and which visits
    (None: all; slots of unknown visits always count).
    """

    horizon: int
    visible: Bool[np.ndarray, " V"] | None = None

    @property
    def key(self) -> ViewKey:
        """The same for views that show the same."""
        return self.horizon, None if self.visible is None else np.packbits(self.visible).tobytes()


@dataclass(frozen=True)
class DecodedSlots:
    """Some slots of a layer, ready to compute with. The tensors are only good until the next block comes."""

    block: Block
    keys: Float[Tensor, "m d_in"]
    errors: Float[Tensor, "m d_out"] | None

    @property
    def ids(self) -> Int[np.ndarray, " m"]:
        """The number of each slot in its layer."""
        return self.block.slots

    def modules_among(self, which: Sequence[int]) -> Bool[np.ndarray, " m"]:
        """Whether each slot comes from one of these modules of its layer."""
        return np.isin(self.block.calls.module[self.block.call], which)

    def take(self, rows: Int[np.ndarray, " k"]) -> "DecodedSlots":
        """Some of them."""
        index = torch.from_numpy(rows)
        errors = None if self.errors is None else self.errors[index]
        return DecodedSlots(self.block.take(rows), self.keys[index], errors)

    def factors(self, parameter: str) -> Float[Tensor, " m"]:
        """What the error of each slot is multiplied with in the gradient of a parameter, with its power of two."""
        calls, call, layer = self.block.calls, self.block.call, self.block.layer
        if parameter in layer.weights:
            factor = calls.factor[call]
        else:
            users = [i for i, module in enumerate(layer.modules) if parameter in module.biases]
            factor = calls.bias_factor[call] * self.modules_among(users)
        value = torch.from_numpy(factor).to(self.keys.dtype)
        return value if self.block.error_scale is None else value.mul_(self.block.error_scale)

    def values(self, of_step: Float[np.ndarray, " T1"], bias: bool = False) -> Float[Tensor, " m"]:
        """What the error of each slot is multiplied with: its coefficient, and its power of two."""
        value = torch.from_numpy(self.block.coefficients(of_step, bias)).to(self.keys.dtype)
        return value if self.block.error_scale is None else value.mul_(self.block.error_scale)


def stream(
    store: Store, layer: str, view: StoreView, *, errors: bool, watch: OnProgress | None = None
) -> Iterator[DecodedSlots]:
    """The slots of a layer that the view shows, block by block, in the order of training."""
    info, _ = store.layer(layer)
    whole = view.visible is None and view.horizon >= store.steps
    rows = store.block_rows(info.name)
    key_buffer = torch.empty(rows, info.key_size, dtype=store.compute)
    error_buffer = torch.empty(rows if errors else 0, info.d_out, dtype=store.compute)
    for block in store.blocks(info.name, errors=errors, upto=view.horizon):
        count = len(block.slots)
        shown = None if whole else _shown(block, view)
        if shown is not None:
            block = block.take(shown)
        if len(block.slots):
            yield DecodedSlots(
                block,
                _decode(block.keys, key_buffer),
                None if block.errors is None else _decode(block.errors, error_buffer),
            )
        if watch:
            watch(count)


def decoded(block: Block, dtype: torch.dtype) -> DecodedSlots:
    """A block, ready to compute with."""
    return DecodedSlots(block, block.keys.to(dtype), None if block.errors is None else block.errors.to(dtype))


def _shown(block: Block, view: StoreView) -> np.ndarray | None:
    shown = block.steps <= view.horizon
    if view.visible is not None:
        shown &= np.append(view.visible, True)[block.visits]  # −1, not known, looks at the last entry
    return None if shown.all() else np.flatnonzero(shown)


def _decode(stored: Tensor, buffer: Tensor) -> Tensor:
    if stored.dtype == buffer.dtype:
        return stored
    out = buffer[: stored.shape[0]]
    out.copy_(stored)
    return out
