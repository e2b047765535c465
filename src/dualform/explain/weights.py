"""Weights from slots: every explained parameter as a sum over training, whole or by group."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualform.engine import StoreView, explained_layers, split_by_group
from dualform.progress import Progress, bar
from dualform.store import Store
from dualform.types import ParameterInfo, ParameterSplit


def explained(store: Store) -> list[str]:
    """The parameters that slots or a ledger rebuild."""
    return [p.name for p in store.manifest.parameters if p.kind != "rest"]


def split_by(
    store: Store, view: StoreView, names: Sequence[str], progress: Progress, **options: Any
) -> dict[str, ParameterSplit]:
    """Explained parameters as sums, with a progress bar. Options go to :func:`split`."""
    layers = [layer for layer in explained_layers(store) if set(layer.parameters) & set(names)]
    with bar("rebuilding the weights", sum(store.slots(layer.name) for layer in layers), progress) as watch:
        return split_by_group(store, view, names, watch=watch, **options)


def network(store: Store, view: StoreView, progress: Progress) -> dict[str, Tensor]:
    """Every parameter and buffer that the memory holds: rebuilt from the slots, the rest from its snapshots.

    A mask goes the shortest way: through a ledger that was made before, or by what it hides, else by what it shows.
    """
    exact = (weights_from_ledger(store, view) or by_hidden(store, view)) if view.visible is not None else None
    if exact is None:
        parts = split_by(store, view, explained(store), progress) if view.horizon else {}
        exact = {name: part.total for name, part in parts.items()}
        if view.visible is None:
            store.cache.exact_weights[view.horizon] = exact
    return {
        p.name: exact[p.name].to(getattr(torch, p.dtype)) if p.name in exact else store.snapshot(p.name, view.horizon)
        for p in _kept(store, view.horizon)
    }


def _kept(store: Store, step: int) -> list[ParameterInfo]:
    """All parameters and buffers but the frozen ones of which the memory holds fingerprints alone."""
    missing = set(store.not_kept(step))
    return [p for p in store.manifest.parameters if p.name not in missing]


def weights_from_ledger(store: Store, view: StoreView) -> dict[str, Tensor] | None:
    """The explained parameters from a ledger whose groups the mask hides or shows as a whole; None without one."""
    assert view.visible is not None
    for ledger in store.cache.ledgers.values():
        if ledger.horizon == view.horizon and (shown := ledger.shown(view.visible)) is not None:
            return {name: part.initial + part.groups[shown].sum(0) for name, part in ledger.parts.items()}
    return None


def by_hidden(store: Store, view: StoreView) -> dict[str, Tensor] | None:
    """The explained parameters less what the mask hides: where all of them are known, and it hides less than half."""
    assert view.visible is not None
    whole = store.cache.exact_weights.get(view.horizon)
    if whole is None or any(store.is_preconditioned(name) or not store.parameters[name].by_slots for name in whole):
        return None
    layers = explained_layers(store)
    if any((store.calls(layer.name).visit < 0).any() for layer in layers):  # slots that no mask can hide
        return None
    hidden = ~view.visible & (store.visits["step"].to_numpy() <= view.horizon)
    if 2 * int(hidden.sum()) > len(hidden):
        return None
    gone = split_by_group(store, StoreView(view.horizon, hidden), list(whole))
    return {name: total - gone[name].groups.sum(0) for name, total in whole.items()}


def kept_network(store: Store, step: int) -> dict[str, Tensor]:
    """Every parameter and buffer from its snapshot."""
    return {p.name: store.snapshot(p.name, step) for p in _kept(store, step)}


def one_parameter(store: Store, view: StoreView, name: str) -> Tensor:
    """One explained parameter in float64."""
    return split_by_group(store, view, [name])[name].total
