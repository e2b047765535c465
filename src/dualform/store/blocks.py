"""Slots in memory: the calls they came from, and some consecutive ones at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.types import LayerInfo


@dataclass(frozen=True)
class CallTable:
    """The calls of one layer as columns, in the order of their slots. ``start`` is the first slot of each."""

    start: Int[np.ndarray, " k"]
    rows: Int[np.ndarray, " k"]
    step: Int[np.ndarray, " k"]
    visit: Int[np.ndarray, " k"]
    batch: Int[np.ndarray, " k"]
    stride: Int[np.ndarray, " k"]
    call: Int[np.ndarray, " k"]
    module: Int[np.ndarray, " k"]
    factor: Float[np.ndarray, " k"]
    bias_factor: Float[np.ndarray, " k"]

    def of(self, slots: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """The call of each slot."""
        return np.searchsorted(self.start, slots, side="right") - 1

    def visits_of(self, slots: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """The visit of each slot, −1 where it is not known."""
        if self._shift is not None:
            return slots + self._shift
        k = self.of(slots)
        visits = self.visit[k] + (slots - self.start[k]) // self.stride[k] % self.batch[k]
        return np.where(self.visit[k] < 0, -1, visits)

    @cached_property
    def _shift(self) -> int | None:
        """From slots to their visits, where every slot is the one row of its visit and they come in the same order."""
        shift = self.visit - self.start
        plain = (self.stride == 1) & (self.rows <= self.batch) & (self.visit >= 0) & (shift == shift[:1])
        return int(shift[0]) if plain.size and plain.all() else None

    @cached_property
    def axis_of_examples(self) -> Literal["first", "last", "between"]:
        """Which of the leading axes counted the examples, in the calls that show it."""
        several = (self.visit >= 0) & (self.batch > 1) & (self.rows > self.batch)
        stride, rows_each = self.stride[several], (self.rows // self.batch)[several]
        if not len(stride) or (stride == rows_each).any():
            return "first"
        return "last" if (stride == 1).all() else "between"

    def positions_of(self, slots: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """The place of each slot inside its example (token, pixel)."""
        k = self.of(slots)
        r, stride = slots - self.start[k], self.stride[k]
        return r // (stride * self.batch[k]) * stride + r % stride


@dataclass(frozen=True)
class Block:
    """Some consecutive slots of one layer, as they lie on disk."""

    slots: Int[np.ndarray, " m"]
    keys: Shaped[Tensor, "m d_in"]
    key_scale: Float[Tensor, " m"] | None
    errors: Shaped[Tensor, "m d_out"] | None
    error_scale: Float[Tensor, " m"] | None
    calls: CallTable
    layer: LayerInfo

    @cached_property
    def call(self) -> Int[np.ndarray, " m"]:
        """The call of each row."""
        return self.calls.of(self.slots)

    @cached_property
    def steps(self) -> Int[np.ndarray, " m"]:
        """The step of each row."""
        return self.calls.step[self.call]

    @cached_property
    def visits(self) -> Int[np.ndarray, " m"]:
        """The visit of each row, −1 where it is not known."""
        return self.calls.visits_of(self.slots)

    def coefficients(self, of_step: Float[np.ndarray, " T1"], bias: bool = False) -> Float[np.ndarray, " m"]:
        """What each row counts for in the weight (or the bias), from the coefficient of its step."""
        return of_step[self.steps] * (self.calls.bias_factor if bias else self.calls.factor)[self.call]

    def take(self, rows: Int[np.ndarray, " k"]) -> "Block":
        """Some rows of the block."""
        index = torch.from_numpy(rows)
        return Block(
            slots=self.slots[rows],
            keys=self.keys[index],
            key_scale=_some(self.key_scale, index),
            errors=_some(self.errors, index),
            error_scale=_some(self.error_scale, index),
            calls=self.calls,
            layer=self.layer,
        )


def join_blocks(blocks: Sequence[Block]) -> Block:
    """Some blocks of one layer as one."""
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]
    return Block(
        slots=np.concatenate([block.slots for block in blocks]),
        keys=torch.cat([block.keys for block in blocks]),
        key_scale=_scales([(block.key_scale, len(block.slots)) for block in blocks]),
        errors=None if first.errors is None else torch.cat([b.errors for b in blocks if b.errors is not None]),
        error_scale=_scales([(block.error_scale, len(block.slots)) for block in blocks]),
        calls=first.calls,
        layer=first.layer,
    )


def _scales(found: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    known = next((scale for scale, _ in found if scale is not None), None)
    return None if known is None else torch.cat([known.new_ones(m) if scale is None else scale for scale, m in found])


def _some(tensor: Tensor | None, index: Tensor | slice) -> Tensor | None:
    return None if tensor is None else tensor[index]
