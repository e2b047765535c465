"""From the best slots of a scan to hits: their weights and contributions, steps, positions and columns."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.engine import LayerQueries, StoreView, TopSlots, coefficients
from dualform.store import LayerMatrix, Store
from dualform.types import LayerInfo

from .answers import Hits
from .query import LayerQuestion


def hits_of(store: Store, view: StoreView, asked: LayerQuestion, queries: LayerQueries, best: TopSlots) -> Hits:
    """The best slots of each query, with all that is known of them."""
    calls, found = store.calls(asked.info.name), best.slot.numpy()
    n = len(found)
    slots = found[:, (found >= 0).all(0)]
    flat = slots.reshape(-1)
    weight, contribution = weigh_slots(store, view, asked.info, queries, slots)
    if asked.score == "contribution":
        contribution = best.scores[:, : slots.shape[1]].to(weight.dtype)
    visits = calls.visits_of(flat) if len(flat) else flat
    columns = visit_columns(store, visits)
    return Hits(
        asked.module.name, asked.score, asked.target, _shaped(slots, n), _shaped(calls.step[calls.calls_of(flat)], n),
        _shaped(calls.positions_of(flat), n), _shaped(visits, n), weight, contribution, columns,
    )  # fmt: skip


def visit_columns(store: Store, visits: Int[np.ndarray, " m"]) -> pa.Table:
    """The columns of some visits; null where a visit is not known."""
    if not len(store.visits):
        return store.visits.slice(0, 0)
    columns = store.visits.take(np.where(visits < 0, 0, visits))
    if not (visits < 0).any():
        return columns
    unknown = pa.array(visits < 0)
    return pa.table({
        name: pc.if_else(unknown, pa.scalar(None, column.type), column)  # pyright: ignore[reportAttributeAccessIssue]
        for name, column in zip(columns.column_names, columns.columns, strict=True)
    })  # fmt: skip


def weigh_slots(
    store: Store, view: StoreView, info: LayerInfo, queries: LayerQueries, slots: Int[np.ndarray, "n k"]
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]:
    """Weight and contribution of a few slots, read one by one; the contribution is NaN where none is known."""
    n, k = slots.shape
    flat = slots.reshape(-1)
    keys = store.gather(info.name, flat, "key").unflatten(0, (n, k))
    rows = queries.rows.unflatten(0, (n, -1))
    weight = (rows == keys.mT).to(keys.dtype) if info.indexed else torch.einsum("nrd,nkd->nrk", rows, keys)
    explained = info.keep == "slots" and all(store.parameters[name].by_slots for name in info.weights)
    if not explained or queries.directions is None or any(store.is_preconditioned(name) for name in info.weights):
        return weight.sum(1), torch.full((n, k), torch.nan, dtype=weight.dtype)
    calls = store.calls(info.name)
    step, factor = calls.step[calls.calls_of(flat)], calls.factor[calls.calls_of(flat)]
    errors = store.gather(info.name, flat, "error").unflatten(0, (n, k))
    directions = queries.directions.unflatten(0, (n, -1))
    total = torch.zeros(n, k, dtype=weight.dtype)
    for piece in info.pieces:
        of_step = coefficients(store, piece.parameter, view.horizon).of_step
        value = torch.from_numpy(of_step[step] * factor).to(weight.dtype).reshape(n, k)
        for some, e in LayerMatrix(info).piece_parts(piece):
            alpha = weight if info.indexed else torch.einsum("nrd,nkd->nrk", rows[..., some], keys[..., some])
            pull = torch.einsum("nrd,nkd->nrk", directions[..., e], errors[..., e])
            total += (alpha * pull).sum(1) * value
    return weight.sum(1), total


def _shaped(values: np.ndarray, n: int) -> Int[Tensor, "n k"]:
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(n, -1)
