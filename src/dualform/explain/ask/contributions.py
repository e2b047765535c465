"""The parts of a layer's output that sum to the whole: what groups put into its weight and bias, and the beginning."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.engine import (
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

from ..answers import Groups
from ..groups import GroupAndPosition, GroupOfSlot, group_slots
from ..query import Question, apply, is_preconditioned
from ..weights import LARGEST, is_shared

A_GROUP = 4e6
"""Multiplications that take as long as the fixed cost of one more group of a ledger."""


def slot_groups(question: Question, column: str, places: bool) -> GroupOfSlot:
    """The groups of a column, for all layers that feed the weight or the bias: a bias can be shared."""
    store, layer = question.store, question.info.name
    if places:
        return GroupAndPosition.in_layer(store, layer, column)
    biases = set(question.module.biases)
    feeding = [info.name for info in store.manifest.layers if info.name == layer or biases & set(info.biases)]
    return group_slots(store, feeding, column)


def output_parts(question: Question, groups: GroupOfSlot, values: Float[Tensor, "n G"]) -> Groups:
    """The sums of a score over groups; for contributions with the bias, the initial part and the total as well."""
    info, module, column = question.info, question.module, groups.column
    if question.score != "contribution":
        return Groups(module.name, column, question.score, question.target, groups.names, values)
    queries = question.queries
    assert queries.directions is not None
    n, directions = len(queries), queries.directions.double()
    parts = {name: initial_weight(question, name, groups) for name in info.weights}
    initial = (directions * apply(info, assemble_matrix(info, parts), queries.rows.double())).sum(1)
    initial = initial.unflatten(0, (n, -1)).sum(1)
    pull = directions.unflatten(0, (n, -1)).sum(1)
    bias = torch.zeros_like(values)
    for name in module.biases:
        part = bias_parts(question, name, groups)
        bias, initial = bias + pull @ part.groups.mT, initial + pull @ part.initial
    outputs = question.outputs.flatten(0, 1).double().cpu()
    total = (directions * outputs).sum(1).unflatten(0, (n, -1)).sum(1)
    return Groups(module.name, column, question.score, question.target, groups.names, values, bias, initial, total)


def sums_without_scan(
    question: Question, groups: GroupOfSlot, alone: bool, watch: OnProgress | None
) -> Float[Tensor, "n G"] | None:
    """The sums of a score over groups where no scan is needed.

    None where a scan is needed, or where one is made anyway because sums are not asked for ``alone``.
    """
    if question.score != "contribution":
        return sums_of_weights(question, groups, watch) if alone else None
    if not prefers_parameter_sums(question.store, question.info, len(question.queries), groups, alone):
        return None
    return parts_from_ledger(question, groups, watch)


def prefers_parameter_sums(store: Store, info: LayerInfo, queries: int, groups: GroupOfSlot, alone: bool) -> bool:
    """Whether sums of contributions come from the parts of the weights.

    They do where other layers feed the weights too, or where that is less work than a scan or a sweep for the sums
    ``alone``.
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


def sums_of_weights(question: Question, groups: GroupOfSlot, watch: OnProgress | None) -> Float[Tensor, "n G"] | None:
    """Σα or Σ|α| of each group, through the cached sums of the groups' keys; None where they do not give it."""
    store, view, queries, column = question.store, question.view, question.queries, groups.column
    layer, signed = question.info.name, question.score == "weight"
    positive = question.info.indexed or bool((queries.rows >= 0).all())
    if not sums_fit_in_memory(store, layer, len(groups.names)) or not (signed or positive):
        return None
    sums = store.cache.key_sums(
        KeySumsKey(layer, column, groups.names, view.key, signed),
        lambda: key_sums(store, layer, view, groups, len(groups.names), signed=signed, watch=watch),
    )
    return None if sums is None else summed_weights(queries, sums, indexed=question.info.indexed)


def parts_from_ledger(question: Question, groups: GroupOfSlot, watch: OnProgress | None) -> Float[Tensor, "n G"]:
    """The contribution of each group through its part of the weights."""
    info, queries = question.info, question.queries
    assert queries.directions is not None
    parts = kept_split(question, info.weights, groups, watch)
    rows, directions, contributions = queries.rows.double(), queries.directions.double(), []
    for i in range(len(groups.names)):
        matrix = assemble_matrix(info, {name: part.groups[i] for name, part in parts.items()})
        contributions.append((directions * apply(info, matrix, rows)).sum(1).unflatten(0, (len(queries), -1)).sum(1))
    return torch.stack(contributions, 1)


def initial_weight(question: Question, name: str, groups: GroupOfSlot) -> Float[Tensor, "..."]:
    """What is left of a first weight. Under a preconditioned rule it comes with the parts of the groups."""
    store, view = question.store, question.view
    if store.parameters[name].by_slots and not store.is_preconditioned(name):
        return initial_part(store, name, view.horizon)
    if _split_key(question, name, groups) not in store.cache.splits and store.is_preconditioned(name):
        groups = group_slots(store, [], None)  # the initial part is the same for all groups
    return kept_split(question, [name], groups)[name].initial


def bias_parts(question: Question, bias: str, groups: GroupOfSlot) -> ParameterSplit:
    """What is left of the first bias, and what each group put into it."""
    if question.store.parameters[bias].kind == "rest":
        snapshot = question.store.snapshot(bias, question.view.horizon).double()
        return ParameterSplit(snapshot, torch.zeros(len(groups.names), len(snapshot), dtype=torch.float64))
    return kept_split(question, [bias], groups)[bias]


def _split_key(question: Question, name: str, groups: GroupOfSlot) -> SplitKey:
    return SplitKey(name, groups.column, groups.names, question.view.key)


def kept_split(
    question: Question, names: Sequence[str], groups: GroupOfSlot, watch: OnProgress | None = None
) -> dict[str, ParameterSplit]:
    """Parameters split by the groups of a column, cached for the next question."""
    store, view = question.store, question.view
    keys = {name: _split_key(question, name, groups) for name in names}
    size = 8 * len(groups.names) * sum(store.parameters[name].size for name in names)
    if size > LARGEST:
        raise QueryError(
            f"{len(groups.names):,} groups of '{groups.column}' are too many for the parts of {list(names)[:3]} "
            f"({size / 2**30:.1f} GiB). Choose a coarser column."
        )
    missing = [name for name, key in keys.items() if key not in store.cache.splits]
    split = partial(split_by_group, store, view, group_of=groups, groups=len(groups.names), watch=watch)
    new = split(names=missing)
    return {
        name: store.cache.splits(key, lambda name=name: new.get(name) or split(names=[name])[name])
        for name, key in keys.items()
    }
