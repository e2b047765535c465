"""Slots in memory: the table of the calls they came from, and blocks of consecutive slots."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.types import LayerInfo


@dataclass(frozen=True)
class CallTable:
    """The calls of one layer as columns, in the order of their slots. ``start`` is the first slot of each call."""

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

    def calls_of(self, slots: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """The call of each slot."""
        return np.searchsorted(self.start, slots, side="right") - 1

    def visits_of(self, slots: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """The visit of each slot, −1 where it is unknown."""
        if self._shift is not None:
            return slots + self._shift
        k = self.calls_of(slots)
        visits = self.visit[k] + (slots - self.start[k]) // self.stride[k] % self.batch[k]
        return np.where(self.visit[k] < 0, -1, visits)

    @cached_property
    def _shift(self) -> int | None:
        """Visit minus slot, if that is one constant: every slot is the only row of its visit, in the same order."""
        shift = self.visit - self.start
        is_constant = (self.stride == 1) & (self.rows <= self.batch) & (self.visit >= 0) & (shift == shift[:1])
        return int(shift[0]) if is_constant.size and is_constant.all() else None

    @cached_property
    def axis_of_examples(self) -> Literal["first", "last", "between"]:
        """Which of the leading axes counts the examples, judged by the calls where it makes a difference."""
        telling = (self.visit >= 0) & (self.batch > 1) & (self.rows > self.batch)
        stride, rows_per_example = self.stride[telling], (self.rows // self.batch)[telling]
        if not len(stride) or (stride == rows_per_example).any():
            return "first"
        return "last" if (stride == 1).all() else "between"

    def positions_of(self, slots: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """The position of each slot inside its example (token, pixel)."""
        k = self.calls_of(slots)
        row, stride = slots - self.start[k], self.stride[k]
        return row // (stride * self.batch[k]) * stride + row % stride


@dataclass(frozen=True)
class Block:
    """Consecutive slots of one layer, in the precision in which they are stored."""

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
        return self.calls.calls_of(self.slots)

    @cached_property
    def steps(self) -> Int[np.ndarray, " m"]:
        """The step of each row."""
        return self.calls.step[self.call]

    @cached_property
    def visits(self) -> Int[np.ndarray, " m"]:
        """The visit of each row, −1 where it is unknown."""
        return self.calls.visits_of(self.slots)

    def coefficients(self, of_step: Float[np.ndarray, " T1"], bias: bool = False) -> Float[np.ndarray, " m"]:
        """The coefficient of each row in the weight (or the bias): that of its step, times the factor of its call."""
        return of_step[self.steps] * (self.calls.bias_factor if bias else self.calls.factor)[self.call]

    def without_rows(self) -> "Block":
        """Which slots they are, without keys and errors: it does not hold on to their file."""
        bare = replace(
            self, keys=self.keys.new_empty(len(self.slots), 0), key_scale=None, errors=None, error_scale=None
        )
        vars(bare).update({name: vars(self)[name] for name in ("call", "steps", "visits") if name in vars(self)})
        return bare

    def take(self, rows: Int[np.ndarray, " k"]) -> "Block":
        """The block that holds only these rows."""
        index = torch.from_numpy(rows)
        return Block(
            slots=self.slots[rows],
            keys=self.keys[index],
            key_scale=_rows_of(self.key_scale, index),
            errors=_rows_of(self.errors, index),
            error_scale=_rows_of(self.error_scale, index),
            calls=self.calls,
            layer=self.layer,
        )


def join_blocks(blocks: Sequence[Block]) -> Block:
    """Blocks of one layer, concatenated."""
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]
    return Block(
        slots=np.concatenate([block.slots for block in blocks]),
        keys=torch.cat([block.keys for block in blocks]),
        key_scale=_join_scales([(block.key_scale, len(block.slots)) for block in blocks]),
        errors=None if first.errors is None else torch.cat([b.errors for b in blocks if b.errors is not None]),
        error_scale=_join_scales([(block.error_scale, len(block.slots)) for block in blocks]),
        calls=first.calls,
        layer=first.layer,
    )


def _join_scales(scales: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """The scales of several blocks, each given with its number of rows; a block without scales has scale 1."""
    first = next((scale for scale, _ in scales if scale is not None), None)
    return None if first is None else torch.cat([first.new_ones(m) if scale is None else scale for scale, m in scales])


def _rows_of(tensor: Tensor | None, index: Tensor | slice) -> Tensor | None:
    return None if tensor is None else tensor[index]
