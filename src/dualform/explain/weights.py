"""Weights from slots: every explained parameter as a sum over training, whole or by group."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualform.attend import Split, View, explained_layers, split
from dualform.memory import Store

from .progress import bar


def explained(store: Store) -> list[str]:
    """The parameters that slots or a ledger rebuild."""
    return [p.name for p in store.manifest.parameters if p.kind != "rest"]


def split_by(store: Store, view: View, names: Sequence[str], progress: bool, **options: Any) -> dict[str, Split]:
    """Explained parameters as sums, with a progress bar. Options go to :func:`split`."""
    layers = [layer for layer in explained_layers(store) if set(layer.parameters) & set(names)]
    with bar("rebuilding the weights", sum(store.slots(layer.name) for layer in layers), progress) as watch:
        return split(store, view, names, watch=watch, **options)


def whole_network(store: Store, view: View, progress: bool) -> dict[str, Tensor]:
    """Every parameter and buffer: rebuilt from the slots, the rest from its snapshots."""
    parts = split_by(store, view, explained(store), progress) if view.horizon else {}
    return {
        p.name: parts[p.name].total.to(getattr(torch, p.dtype))
        if p.name in parts
        else store.snapshot(p.name, view.horizon)
        for p in store.manifest.parameters
    }


def kept_network(store: Store, step: int) -> dict[str, Tensor]:
    """Every parameter and buffer from its snapshot."""
    return {p.name: store.snapshot(p.name, step) for p in store.manifest.parameters}


def one_parameter(store: Store, view: View, name: str) -> Tensor:
    """One explained parameter in float64."""
    return split(store, view, [name])[name].total
