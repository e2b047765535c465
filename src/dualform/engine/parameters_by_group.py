"""Explained parameters split by groups of slots.

Where the coefficients of slots are numbers, one pass over the slots is enough. Under a preconditioned rule, training is
run again from the slots; a parameter that only a ledger explains is read from the ledger.
"""

from collections.abc import Iterable
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from dualform.errors import QueryError
from dualform.progress import OnProgress
from dualform.store import LedgerState, Store
from dualform.types import ParameterSplit

from .layer_progress import LayerProgress
from .layer_sums import explained_layers, initial_part, layer_sums, layers_by_pass
from .parameter_sums import parameter_sum
from .preconditioned import SlotGroups, rerun_from_slots
from .stream import StoreView


def split_by_group(
    store: Store, view: StoreView, names: Iterable[str], *, group_of: SlotGroups | None = None, groups: int = 1,
    watch: OnProgress | None = None,
) -> dict[str, ParameterSplit]:  # fmt: skip
    """Split explained parameters at the horizon by groups of the visible slots (by default one group of all)."""
    names = list(names)
    in_ledger = [name for name in names if store.parameters[name].kind == "ledger"]
    by_slots = [name for name in names if name not in in_ledger]
    preconditioned = [name for name in by_slots if store.is_preconditioned(name)]
    splits = {name: _initial_split(store, view, name, groups) for name in by_slots if name not in preconditioned}
    feeding = [layer for layer in explained_layers(store) if view.horizon and set(layer.parameters) & set(splits)]
    swept = [layer for layer in store.manifest.layers if set(layer.parameters) & set(preconditioned)]
    progress = LayerProgress(store, [*feeding, *(layer for layer in swept if layer not in feeding)], watch)
    for layers in layers_by_pass(store, feeding):
        sums = {
            layer.name: [
                term
                for name, term in layer_sums(store, layer, view.horizon, group_of=group_of, groups=groups).items()
                if name in splits
            ]
            for layer in layers
        }
        parameter_sum(store, sums, view, progress.of(layers))
        for term in chain.from_iterable(sums.values()):
            before = splits[term.parameter]
            total = before.groups + term.as_parameter(store.parameters[term.parameter].shape)
            splits[term.parameter] = ParameterSplit(before.initial, total)
    for name, parts in rerun_from_slots(
        store, preconditioned, view, group_of=group_of, groups=groups, progress=progress
    ).items():
        splits[name] = ParameterSplit(parts.initial, parts.groups)
    if in_ledger:
        splits |= split_from_ledger(store, view, in_ledger, group_of, groups)
    return {name: splits[name] for name in names}


def split_from_ledger(
    store: Store, view: StoreView, names: Iterable[str], group_of: SlotGroups | None, groups: int
) -> dict[str, ParameterSplit]:
    """Parameters that a ledger explains; each requested group must be a union of groups of the ledger."""
    if not view.horizon:
        return {name: ParameterSplit(store.initial(name).double(), _zeros(store, name, groups)) for name in names}
    state = store.ledger_state(view.horizon)
    places = _requested_groups(store, view, state, group_of)
    out = {}
    for name in names:
        parts, total = state.weights[name].double(), _zeros(store, name, groups)
        for i, group in enumerate(places):
            if group >= 0:
                total[group] += parts[1 + i]
        out[name] = ParameterSplit(parts[0], total)
    return out


def _requested_groups(store: Store, view: StoreView, state: LedgerState, group_of: SlotGroups | None) -> list[int]:
    """For each group of a ledger the requested group that contains it; −1 if it is masked."""
    visits = store.visits
    values = visits[state.column].to_pylist() if state.column in visits.column_names else []
    numbers = {name: i for i, name in enumerate(state.groups)}
    of_visit = np.array([numbers.get(value, -1) for value in values], np.int64)
    requested = np.zeros(len(of_visit), np.int64) if group_of is None else _group_of_visit(group_of, len(of_visit))
    if view.visible is not None:
        requested = np.where(view.visible, requested, -1)
    requested_of_group = [set(requested[of_visit == i].tolist()) for i in range(len(state.groups))]
    for name, groups in zip(state.groups, requested_of_group, strict=True):
        if len(groups) > 1:
            raise QueryError(
                f"the ledger was recorded by '{state.column}', and {state.column}={name!r} would have to be split. "
                f"Ask for groups or masks of '{state.column}'."
            )
    return [groups.pop() if groups else -1 for groups in requested_of_group]


def _group_of_visit(group_of: SlotGroups, visits: int) -> np.ndarray:
    of_visit = getattr(group_of, "of_visit", None)
    if of_visit is None:
        raise QueryError("a ledger holds groups of visits only, and no times: groups by training time need slots.")
    return of_visit[:visits]


def _zeros(store: Store, name: str, groups: int) -> Tensor:
    return torch.zeros(groups, *store.parameters[name].shape, dtype=torch.float64)


def _initial_split(store: Store, view: StoreView, name: str, groups: int) -> ParameterSplit:
    initial = initial_part(store, name, view.horizon)
    return ParameterSplit(initial, initial.new_zeros(groups, *initial.shape))
