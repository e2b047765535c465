r"""Sums of attention weights without a scan.

:math:`\sum_t k_t\cdot q = (\sum_t k_t)\cdot q`, so the keys of each group are added up once, and every query after that
is one small product, however many slots there are. If no entry of a key or a query is negative, as after a ReLU,
:math:`|\alpha_t| = \alpha_t`, and the same sums give the total attention as well.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.progress import OnProgress
from dualform.store import Block, Store

from .scan import LayerQueries
from .stream import StoreView, stream

LARGEST = 256 << 20
"""The most bytes that the sums may take."""


def sums_fit_in_memory(store: Store, layer: str, groups: int) -> bool:
    """Whether the sums of this many groups are small enough to be cached."""
    return 8 * groups * store.layer(layer)[0].d_in <= LARGEST


def key_sums(
    store: Store, layer: str, view: StoreView, group_of: Callable[[Block], Int[np.ndarray, " m"]], groups: int, *,
    signed: bool, watch: OnProgress | None = None,
) -> Float[Tensor, "G d_in"] | None:  # fmt: skip
    """The sum of the keys of each group, in float64; None if some entry is negative, unless ``signed`` allows it."""
    info, _ = store.layer(layer)
    total = torch.zeros(groups, info.d_in, dtype=torch.float64)
    for slots in stream(store, layer, view, errors=False, watch=watch):
        if not signed and not info.indexed and bool((slots.keys < 0).any()):
            return None
        group = torch.from_numpy(group_of(slots.block))
        if info.indexed:
            counts = torch.ones(len(group), dtype=total.dtype)
            total.index_put_((group, slots.keys[:, 0].long()), counts, accumulate=True)
        else:
            keys = slots.keys.double()
            total.index_add_(0, group, keys if slots.block.key_scale is None else keys * slots.block.key_scale[:, None])
    return total


def summed_weights(queries: LayerQueries, sums: Float[Tensor, "G d_in"], *, indexed: bool) -> Float[Tensor, "n G"]:
    """The sum of α over each group, for every example."""
    rows = queries.rows
    weights = sums[:, rows[:, 0].long()].mT if indexed else rows.to(sums.dtype) @ sums.mT
    return weights.unflatten(0, (len(queries), -1)).sum(1)
