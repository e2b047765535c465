"""The weights of the network at a step and through a mask, rebuilt from slots, ledgers and snapshots."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualform.engine import StoreView, explained_layers, split_by_group
from dualform.progress import Progress, bar
from dualform.store import Store
from dualform.types import LayerInfo, ParameterInfo, ParameterSplit


def explained(store: Store) -> list[str]:
    """The parameters that slots or a ledger rebuild."""
    return [p.name for p in store.manifest.parameters if p.kind != "rest"]


def is_shared(store: Store, info: LayerInfo) -> bool:
    """Whether other layers feed the weights of a layer too: an embedding that is tied to the output."""
    return any(layer is not info and set(layer.weights) & set(info.weights) for layer in store.manifest.layers)


def split_by(
    store: Store, view: StoreView, names: Sequence[str], progress: Progress, **options: Any
) -> dict[str, ParameterSplit]:
    """Split explained parameters by groups, with a progress bar. Options go to :func:`split_by_group`."""
    layers = [layer for layer in explained_layers(store) if set(layer.parameters) & set(names)]
    with bar("rebuilding the weights", sum(store.slots(layer.name) for layer in layers), progress) as watch:
        return split_by_group(store, view, names, watch=watch, **options)


def network(store: Store, view: StoreView, progress: Progress) -> dict[str, Tensor]:
    """Every parameter and buffer that the memory holds: rebuilt from the slots, the rest from its snapshots.

    Through a mask they come from what is cheapest: a cached ledger, the slots that it hides, or those that it shows.
    """
    exact = (weights_from_ledger(store, view) or weights_less_hidden(store, view)) if view.visible is not None else None
    if exact is None:
        parts = split_by(store, view, explained(store), progress) if view.horizon else {}
        exact = {name: part.total for name, part in parts.items()}
        if view.visible is None:
            store.cache.exact_weights[view.horizon] = exact
    return {
        p.name: exact[p.name].to(getattr(torch, p.dtype)) if p.name in exact else store.snapshot(p.name, view.horizon)
        for p in _held_parameters(store, view.horizon)
    }


def _held_parameters(store: Store, step: int) -> list[ParameterInfo]:
    """All parameters and buffers but the frozen ones, of which the memory holds only fingerprints."""
    missing = set(store.not_kept(step))
    return [p for p in store.manifest.parameters if p.name not in missing]


def weights_from_ledger(store: Store, view: StoreView) -> dict[str, Tensor] | None:
    """The explained parameters from a cached ledger of which the mask splits no group; None without such a ledger."""
    assert view.visible is not None
    for ledger in store.cache.ledgers.values():
        if ledger.horizon == view.horizon and (shown := ledger.shown(view.visible)) is not None:
            return {name: part.initial + part.groups[shown].sum(0) for name, part in ledger.parts.items()}
    return None


def weights_less_hidden(store: Store, view: StoreView) -> dict[str, Tensor] | None:
    """The explained parameters less what the mask hides; None unless they are cached and it hides less than half."""
    assert view.visible is not None
    totals = store.cache.exact_weights.get(view.horizon)
    if totals is None or any(store.is_preconditioned(name) or not store.parameters[name].by_slots for name in totals):
        return None
    layers = explained_layers(store)
    if any((store.calls(layer.name).visit < 0).any() for layer in layers):  # slots that no mask can hide
        return None
    hidden = ~view.visible & (store.visits["step"].to_numpy() <= view.horizon)
    if 2 * int(hidden.sum()) > len(hidden):
        return None
    masked = split_by_group(store, StoreView(view.horizon, hidden), list(totals))
    return {name: total - masked[name].groups.sum(0) for name, total in totals.items()}


def kept_network(store: Store, step: int) -> dict[str, Tensor]:
    """Every parameter and buffer from its snapshot, as it was kept at a step."""
    return {p.name: store.snapshot(p.name, step) for p in _held_parameters(store, step)}


def one_parameter(store: Store, view: StoreView, name: str) -> Tensor:
    """One explained parameter in float64, rebuilt."""
    return split_by_group(store, view, [name])[name].total
