"""The parts of a layer's output that sum to the whole: what groups put into its weight and bias, and the beginning."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualform.engine import (
    LayerQueries,
    StoreView,
    initial_part,
    key_sums,
    split_by_group,
    summed_weights,
    sums_fit_in_memory,
)
from dualform.errors import QueryError
from dualform.progress import OnProgress
from dualform.store import KeySumsKey, SplitKey, Store, assemble_matrix
from dualform.types import LayerInfo, ParameterSplit

from .answers import Groups
from .groups import GroupAndPosition, GroupOfSlot, group_slots
from .ledger import LARGEST
from .query import LayerQuestion, apply

A_GROUP = 4e6
"""Products that would take as long as what each group of a ledger costs besides."""


def group_parts(store: Store, asked: LayerQuestion, column: str, places: bool) -> GroupOfSlot:
    """The groups of a column, for all layers that feed the weight or the bias: a bias can be shared."""
    if places:
        return GroupAndPosition.in_layer(store, asked.info.name, column)
    biases = set(asked.module.biases)
    feeding = [
        layer.name for layer in store.manifest.layers if layer.name == asked.info.name or biases & set(layer.biases)
    ]
    return group_slots(store, feeding, column)


def output_parts(
    store: Store,
    view: StoreView,
    asked: LayerQuestion,
    queries: LayerQueries,
    column: str,
    groups: GroupOfSlot,
    values: Float[Tensor, "n G"],
) -> Groups:
    """The sums of a score over groups; for contributions with all else that the whole is made of."""
    answer = Groups(asked.module.name, column, asked.score, asked.target, groups.names, values)
    if asked.score != "contribution":
        return answer
    assert queries.directions is not None
    n, directions = len(queries), queries.directions.double()
    parts = {name: initial_weight(store, view, name, column, groups) for name in asked.info.weights}
    initial = (directions * apply(asked.info, assemble_matrix(asked.info, parts), queries.rows.double())).sum(1)
    initial = initial.unflatten(0, (n, -1)).sum(1)
    pull = directions.unflatten(0, (n, -1)).sum(1)
    bias = torch.zeros_like(values)
    for name in asked.module.biases:
        part = bias_parts(store, view, name, column, groups)
        bias, initial = bias + pull @ part.groups.mT, initial + pull @ part.initial
    outputs = asked.outputs.flatten(0, 1).double().cpu()
    total = (directions * outputs).sum(1).unflatten(0, (n, -1)).sum(1)
    return Groups(answer.layer, column, asked.score, asked.target, groups.names, values, bias, initial, total)


def without_scan(
    store: Store,
    view: StoreView,
    asked: LayerQuestion,
    queries: LayerQueries,
    column: str,
    groups: GroupOfSlot,
    alone: bool,
    watch: OnProgress | None,
) -> Float[Tensor, "n G"] | None:
    """The sums of a score over groups where no scan is needed; None where it is, or where it comes anyway as sums are
    not asked for ``alone``.
    """
    if asked.score != "contribution":
        return sums_of_weights(store, view, asked, queries, column, groups, watch) if alone else None
    if not prefers_parameter_sums(store, asked.info, len(queries), groups, alone):
        return None
    return parts_from_ledger(store, view, asked, queries, column, groups, watch)


def prefers_parameter_sums(store: Store, info: LayerInfo, queries: int, groups: GroupOfSlot, alone: bool) -> bool:
    """Whether sums of contributions come from the parts of the weights: where other layers feed them too, or where
    that is less work than a scan or a sweep for them ``alone``.
    """
    if info.in_ledger or is_shared(store, info):
        return True
    weights = sum(store.parameters[name].size for name in info.weights)
    if not alone or 8 * len(groups.names) * weights > LARGEST:
        return False
    if is_preconditioned(store, info):
        return queries > 1
    slots = store.slots(info.name)
    by_ledger = slots * weights + A_GROUP * len(groups.names)
    return by_ledger < slots * queries * (info.key_size + info.d_out)


def is_shared(store: Store, info: LayerInfo) -> bool:
    """Whether other layers feed the weights of a layer too: an embedding that is tied to the output."""
    return any(other is not info and set(other.weights) & set(info.weights) for other in store.manifest.layers)


def is_preconditioned(store: Store, info: LayerInfo) -> bool:
    """Whether a preconditioned rule explains the weights of a layer."""
    return any(store.is_preconditioned(name) for name in info.weights)


def sums_of_weights(
    store: Store,
    view: StoreView,
    asked: LayerQuestion,
    queries: LayerQueries,
    column: str,
    groups: GroupOfSlot,
    watch: OnProgress | None,
) -> Float[Tensor, "n G"] | None:
    """Σα or Σ|α| of each group, through the sums of the groups' keys; None where that cannot be. The sums are kept."""
    layer, signed = asked.info.name, asked.score == "weight"
    positive = asked.info.indexed or bool((queries.rows >= 0).all())
    if not sums_fit_in_memory(store, layer, len(groups.names)) or not (signed or positive):
        return None
    sums = store.cache.key_sums(
        KeySumsKey(layer, column, groups.names, view.key, signed),
        lambda: key_sums(store, layer, view, groups, len(groups.names), signed=signed, watch=watch),
    )
    return None if sums is None else summed_weights(queries, sums, indexed=asked.info.indexed)


def parts_from_ledger(
    store: Store,
    view: StoreView,
    asked: LayerQuestion,
    queries: LayerQueries,
    column: str,
    groups: GroupOfSlot,
    watch: OnProgress | None,
) -> Float[Tensor, "n G"]:
    """The contribution of each group through its part of the weights."""
    assert queries.directions is not None
    parts = kept_split(store, view, asked.info.weights, column, groups, watch)
    rows, directions, found = queries.rows.double(), queries.directions.double(), []
    for i in range(len(groups.names)):
        matrix = assemble_matrix(asked.info, {name: part.groups[i] for name, part in parts.items()})
        found.append((directions * apply(asked.info, matrix, rows)).sum(1).unflatten(0, (len(queries), -1)).sum(1))
    return torch.stack(found, 1)


def initial_weight(store: Store, view: StoreView, name: str, column: str, groups: GroupOfSlot) -> Float[Tensor, "..."]:
    """What was left of a first weight. Under a preconditioned rule it comes with the groups' parts."""
    if store.parameters[name].by_slots and not store.is_preconditioned(name):
        return initial_part(store, name, view.horizon)
    if _split_key(name, column, groups, view) not in store.cache.splits and store.is_preconditioned(name):
        column, groups = (
            "",
            GroupOfSlot(("all",), np.zeros(len(store.visits) + 1, np.int64)),
        )  # it is the same for all groups
    return kept_split(store, view, [name], column, groups)[name].initial


def bias_parts(store: Store, view: StoreView, bias: str, column: str, groups: GroupOfSlot) -> ParameterSplit:
    """What was left of the first bias, and what each group put into it."""
    if store.parameters[bias].kind == "rest":
        now = store.snapshot(bias, view.horizon).double()
        return ParameterSplit(now, torch.zeros(len(groups.names), len(now), dtype=torch.float64))
    return kept_split(store, view, [bias], column, groups)[bias]


def _split_key(name: str, column: str, groups: GroupOfSlot, view: StoreView) -> SplitKey:
    return SplitKey(name, column, groups.names, view.key)


def kept_split(
    store: Store,
    view: StoreView,
    names: Sequence[str],
    column: str,
    groups: GroupOfSlot,
    watch: OnProgress | None = None,
) -> dict[str, ParameterSplit]:
    """Parameters split by the groups of a column. Kept for the next question."""
    keys = {name: _split_key(name, column, groups, view) for name in names}
    size = 8 * len(groups.names) * sum(store.parameters[name].size for name in names)
    if size > LARGEST:
        raise QueryError(
            f"{len(groups.names):,} groups of '{column}' are too many for the parts of {list(names)[:3]} "
            f"({size / 2**30:.1f} GiB). Choose a coarser column."
        )
    missing = [name for name, key in keys.items() if key not in store.cache.splits]
    found = split_by_group(store, view, missing, group_of=groups, groups=len(groups.names), watch=watch)
    again = partial(split_by_group, store, view, group_of=groups, groups=len(groups.names), watch=watch)
    return {
        name: store.cache.splits(key, lambda name=name: found.get(name) or again(names=[name])[name])
        for name, key in keys.items()
    }
