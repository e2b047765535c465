r"""Sums over slots that need no query: weights, biases, their projections and entries, whole or by group.

All of them are :math:`\sum_t c_t\, e_t\, f(k_t)^\top` for some features f of the key: the key itself (a weight), 1 (a
bias), a few random projections of it (a certificate that costs one pass). They are added up in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.memory import Block, Store

from .scan import QUERY_ROWS
from .stream import Slots, View, Watch, stream

STRETCH = 512
"""Slots that are added up in the precision they are computed in."""


@dataclass
class Sum:
    """One such sum.

    ``project`` (d_in, f) turns keys into features; None keeps them, ``bias=True`` takes the constant 1 instead.
    ``modules`` restricts to the calls of some modules (a bias belongs to its module, a weight to all that share it);
    ``group_of`` splits the sum into ``groups``. The result is ``total`` (groups, d_out, f).
    """

    of_step: Float[np.ndarray, " T1"]
    bias: bool = False
    project: Float[Tensor, "d_in f"] | None = None
    modules: Sequence[int] | None = None
    group_of: Callable[[Block], Int[np.ndarray, " m"]] | None = None
    groups: int = 1
    total: Tensor = field(init=False, default_factory=lambda: torch.zeros(0))

    def start(self, d_in: int, d_out: int) -> None:
        """Make room for the result."""
        features = 1 if self.bias else d_in if self.project is None else self.project.shape[1]
        self.total = torch.zeros(self.groups, features, d_out, dtype=torch.float64)  # this way round is faster to fill

    def add(self, slots: Slots) -> None:
        """Take a block."""
        assert slots.errors is not None
        value = slots.values(self.of_step, self.bias)
        if self.modules is not None:
            value = value * torch.from_numpy(slots.modules_among(self.modules))
        features = self._features(slots, value.unsqueeze(1))
        if self.group_of is None:
            self.total[0] += _product(features, slots.errors)
            return
        group = self.group_of(slots.block)
        for name in np.unique(group):
            rows = torch.from_numpy(np.flatnonzero(group == name))
            self.total[name] += _product(features[rows], slots.errors[rows])

    def _features(self, slots: Slots, value: Float[Tensor, "m 1"]) -> Float[Tensor, "m f"]:
        if self.bias:
            return value
        if slots.block.key_scale is not None:
            value = value * slots.block.key_scale.unsqueeze(1)
        return (slots.keys if self.project is None else slots.keys @ self.project.to(slots.keys.dtype)) * value


def _product(features: Float[Tensor, "m f"], errors: Float[Tensor, "m d"]) -> Float[Tensor, "f d"]:
    """The sum over m of their outer products: short stretches in the given precision, added up in float64."""
    total = torch.zeros(features.shape[1], errors.shape[1], dtype=torch.float64)
    for f, e in zip(features.split(STRETCH), errors.split(STRETCH), strict=True):
        total += f.mT @ e
    return total


def add_up(store: Store, layer: str, view: View, sums: Sequence[Sum], watch: Watch | None = None) -> None:
    """Fill several sums in one pass over a layer's slots."""
    info, _ = store.layer(layer)
    for each in sums:
        each.start(info.d_in, info.d_out)
    for slots in stream(store, layer, view, errors=True, watch=watch):
        for each in sums:
            each.add(slots)
    for each in sums:
        each.total = each.total.mT


def dual_output(
    store: Store,
    layer: str,
    view: View,
    queries: Float[Tensor, "r d_in"],
    of_step: Float[np.ndarray, " T1"],
    watch: Watch | None = None,
) -> Float[Tensor, "r d_out"]:
    r"""What the slots themselves answer: :math:`\sum_t c_t\, e_t\,(k_t\cdot q)`,
    attention weights first, values after.

    Large terms cancel here, in every layer anew, so all of it is computed in float64.
    """
    info, _ = store.layer(layer)
    queries = queries.double()
    total = torch.zeros(queries.shape[0], info.d_out, dtype=torch.float64)
    for slots in stream(store, layer, view, errors=True, watch=watch):
        assert slots.errors is not None
        value = slots.values(of_step).double().unsqueeze(1)
        if slots.block.key_scale is not None:
            value = value * slots.block.key_scale.unsqueeze(1)
        keys, errors = slots.keys.double(), slots.errors.double() * value
        for q, out in zip(queries.split(QUERY_ROWS), total.split(QUERY_ROWS), strict=True):
            out.addmm_(q @ keys.mT, errors)
    return total
