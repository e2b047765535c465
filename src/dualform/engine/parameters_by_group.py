"""Explained parameters split by groups of slots.

Where the coefficients of slots are numbers, one pass over the slots is enough. Under a preconditioned rule, training is
run again from the slots; a parameter that only a ledger explains is read from the ledger.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from dualform.errors import QueryError
from dualform.progress import OnProgress
from dualform.store import LedgerState, Store
from dualform.types import ParameterSplit

from .layer_sums import explained_layers, initial_part, layer_sums
from .parameter_sums import parameter_sum
from .preconditioned import SlotGroups, rerun_from_slots
from .stream import StoreView


def split_by_group(
    store: Store, view: StoreView, names: Iterable[str], *, group_of: SlotGroups | None = None, groups: int = 1,
    watch: OnProgress | None = None,
) -> dict[str, ParameterSplit]:  # fmt: skip
    """Split some explained parameters at the horizon, by groups of the slots that are shown (one group: all)."""
    wanted = list(names)
    booked = [name for name in wanted if store.parameters[name].kind == "ledger"]
    wanted_by_slots = [name for name in wanted if name not in booked]
    shaped = [name for name in wanted_by_slots if store.is_preconditioned(name)]
    found = {name: _nothing(store, view, name, groups) for name in wanted_by_slots if name not in shaped}
    for layer in explained_layers(store):
        if view.horizon and any(name in found for name in layer.parameters):
            sums = layer_sums(store, layer, view.horizon, group_of=group_of, groups=groups)
            sums = {name: term for name, term in sums.items() if name in found}
            parameter_sum(store, layer.name, view, list(sums.values()), watch)
            for name, term in sums.items():
                before = found[name]
                total = before.groups + term.as_parameter(store.parameters[name].shape)
                found[name] = ParameterSplit(before.initial, total)
    for name, parts in rerun_from_slots(store, shaped, view, group_of=group_of, groups=groups, watch=watch).items():
        found[name] = ParameterSplit(parts.initial, parts.groups)
    if booked:
        found |= split_from_ledger(store, view, booked, group_of, groups)
    return {name: found[name] for name in wanted}


def split_from_ledger(
    store: Store, view: StoreView, names: Iterable[str], group_of: SlotGroups | None, groups: int
) -> dict[str, ParameterSplit]:
    """Parameters that a ledger explains, if the groups that are asked for are made of the ledger's own."""
    if not view.horizon:
        return {name: ParameterSplit(store.initial(name).double(), _zeros(store, name, groups)) for name in names}
    state = store.ledger_state(view.horizon)
    place = _places(store, view, state, group_of)
    out = {}
    for name in names:
        parts, total = state.weights[name].double(), _zeros(store, name, groups)
        for i, group in enumerate(place):
            if group >= 0:
                total[group] += parts[1 + i]
        out[name] = ParameterSplit(parts[0], total)
    return out


def _places(store: Store, view: StoreView, state: LedgerState, group_of: SlotGroups | None) -> list[int]:
    """For each group of a ledger the group that it is asked for as; −1 where it is masked."""
    visits = store.visits
    own = visits[state.column].to_pylist() if state.column in visits.column_names else []
    numbers = {name: i for i, name in enumerate(state.groups)}
    of_visit = np.array([numbers.get(value, -1) for value in own], np.int64)
    asked = np.zeros(len(of_visit), np.int64) if group_of is None else _asked(group_of, len(of_visit))
    if view.visible is not None:
        asked = np.where(view.visible, asked, -1)
    found = [set(asked[of_visit == i].tolist()) for i in range(len(state.groups))]
    for name, some in zip(state.groups, found, strict=True):
        if len(some) > 1:
            raise QueryError(
                f"the ledger was kept by '{state.column}', and {state.column}={name!r} would have to be taken apart. "
                f"Ask for groups or masks of '{state.column}'."
            )
    return [some.pop() if some else -1 for some in found]


def _asked(group_of: SlotGroups, visits: int) -> np.ndarray:
    of_visit = getattr(group_of, "of_visit", None)
    if of_visit is None:
        raise QueryError("a ledger knows groups of visits alone, and nothing of the time at which they came.")
    return of_visit[:visits]


def _zeros(store: Store, name: str, groups: int) -> Tensor:
    return torch.zeros(groups, *store.parameters[name].shape, dtype=torch.float64)


def _nothing(store: Store, view: StoreView, name: str, groups: int) -> ParameterSplit:
    initial = initial_part(store, name, view.horizon)
    return ParameterSplit(initial, initial.new_zeros(groups, *initial.shape))
