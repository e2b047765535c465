"""Hits from the best slots of a scan: their weights, contributions, steps, positions and columns."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.engine import TopSlots, coefficients
from dualform.store import LayerMatrix, Store

from ..query import Question, is_preconditioned
from .answers import HitOrigin, SlotHits


def slot_hits(question: Question, best: TopSlots) -> SlotHits:
    """The best slots of each query, with their weights, contributions and the columns of their visits."""
    calls, best_slots = question.store.calls(question.info.name), best.slot.numpy()
    n = len(best_slots)
    slots = best_slots[:, (best_slots >= 0).all(0)]
    flat = slots.reshape(-1)
    weight, contribution = weigh_slots(question, slots)
    if question.score == "contribution":
        contribution = best.scores[:, : slots.shape[1]].to(weight.dtype)
    visits = calls.visits_of(flat) if len(flat) else flat
    columns = visit_columns(question.store, visits)
    return SlotHits(
        question.module.name,
        question.score,
        question.target,
        weight,
        contribution,
        columns,
        (),
        "",
        slots=_by_query(slots, n),
        steps=_by_query(calls.step[calls.calls_of(flat)], n),
        positions=_by_query(calls.positions_of(flat), n),
        visits=_by_query(visits, n),
        folder=str(question.store.path),
        origin=HitOrigin(position=question.position),
    )


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


def weigh_slots(question: Question, slots: Int[np.ndarray, "n k"]) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]:
    """Weight and contribution of a few slots that are read one by one; the contribution is NaN if it is not known."""
    store, info, queries = question.store, question.info, question.queries
    n, k = slots.shape
    flat = slots.reshape(-1)
    explained = info.keep == "slots" and all(store.parameters[name].by_slots for name in info.weights)
    contributes = explained and queries.directions is not None and not is_preconditioned(store, info)
    gathered = store.gather_rows(info.name, flat, ("key", "error") if contributes else ("key",))
    keys, *errors = (tensor.unflatten(0, (n, k)) for tensor in gathered)
    rows = queries.rows.unflatten(0, (n, -1))
    weight = (rows == keys.mT).to(keys.dtype) if info.indexed else torch.einsum("nrd,nkd->nrk", rows, keys)
    if not errors or queries.directions is None:
        return weight.sum(1), torch.full((n, k), torch.nan, dtype=weight.dtype)
    calls = store.calls(info.name)
    step, factor = calls.step[calls.calls_of(flat)], calls.factor[calls.calls_of(flat)]
    directions = queries.directions.unflatten(0, (n, -1))
    total = torch.zeros(n, k, dtype=weight.dtype)
    for piece in info.pieces:
        of_step = coefficients(store, piece.parameter, question.view.horizon).of_step
        value = torch.from_numpy(of_step[step] * factor).to(weight.dtype).reshape(n, k)
        for inputs, e in LayerMatrix(info).piece_parts(piece):
            alpha = weight if info.indexed else torch.einsum("nrd,nkd->nrk", rows[..., inputs], keys[..., inputs])
            pull = torch.einsum("nrd,nkd->nrk", directions[..., e], errors[0][..., e])
            total += (alpha * pull).sum(1) * value
    return weight.sum(1), total


def _by_query(values: np.ndarray, n: int) -> Int[Tensor, "n k"]:
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(n, -1)
