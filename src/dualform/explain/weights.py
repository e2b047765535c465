"""Weights from slots: every explained parameter as a sum over training, whole or by group."""

from typing import Any

import torch
from torch import Tensor

from dualform.attend import View, add_up, explained_layers, initial_part, layer_sums
from dualform.memory import Store

from .progress import bar


def explained(store: Store) -> list[str]:
    """The parameters that the slots rebuild."""
    return [p.name for p in store.manifest.parameters if p.kind != "rest"]


def sums_over_slots(store: Store, view: View, progress: bool, **options: Any) -> dict[str, Tensor]:
    """What all slots put into each explained parameter, (groups, *shape). Options go to :class:`Sum`."""
    layers = list(explained_layers(store))
    out: dict[str, Tensor] = {}
    with bar("rebuilding the weights", sum(store.slots(layer.name) for layer in layers), progress) as watch:
        for layer in layers:
            terms = layer_sums(store, layer, view.horizon, **options)
            add_up(store, layer.name, view, list(terms.values()), watch)
            for name, term in terms.items():
                total = term.total.reshape(-1, *store.parameters[name].shape)
                out[name] = out[name] + total if name in out else total
    return out


def whole_network(store: Store, view: View, progress: bool) -> dict[str, Tensor]:
    """Every parameter and buffer: rebuilt from the slots, the rest from its snapshots."""
    sums = sums_over_slots(store, view, progress) if view.horizon else {}
    return {
        p.name: (initial_part(store, p.name, view.horizon) + sums[p.name][0]).to(getattr(torch, p.dtype))
        if p.name in sums
        else store.snapshot(p.name, view.horizon)
        for p in store.manifest.parameters
    }


def kept_network(store: Store, step: int) -> dict[str, Tensor]:
    """Every parameter and buffer from its snapshot."""
    return {p.name: store.snapshot(p.name, step) for p in store.manifest.parameters}


def one_parameter(store: Store, view: View, name: str) -> Tensor:
    """One explained parameter in float64. Several layers may feed it: a bias can be shared."""
    total = initial_part(store, name, view.horizon)
    for layer in explained_layers(store):
        term = layer_sums(store, layer, view.horizon).get(name)
        if term is not None:
            add_up(store, layer.name, view, [term])
            total = total + term.total[0].reshape(total.shape)
    return total
