"""Whether a model is the network of a step, by what was kept of it: whole tensors, or a few entries of each weight."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dualform.engine import (
    Agreement,
    StoreView,
    agreement,
    count_moves,
    explained_layers,
    initial_part,
    parameter_entries,
    preconditioned_parameters,
    rounding,
    split_by_group,
)
from dualform.record import hexadecimal
from dualform.store import Store, entry_samples_at, sampled_entries
from dualform.types import LayerInfo

from .network import one_parameter


def is_network_of(store: Store, step: int, model: nn.Module) -> bool:
    """Whether a model is known to be the network of a step, bit for bit.

    Parameters that no rule explains were kept whole, and so were the explained weights of the first and the last step.
    For the steps between, a few entries were kept; they identify a step unless those of its neighbours are the same.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [p.name for p in store.manifest.parameters if p.by_slots]
    in_ledger = [p.name for p in store.manifest.parameters if p.kind == "ledger"]
    for name in in_ledger:
        kept = store.initial(name) if step == 0 else store.kept_at(name, step)
        if kept is None or not _same_bits(tensors[name], kept):
            return False
    samples = [sampled_entries(tensors[name]).of(tensors[name]) for name in names]
    if samples != _kept_samples(store, names, step):
        return False
    if foreign_frozen(store, step, model):
        return False
    missing = set(store.not_kept(step))
    rest = [p.name for p in store.manifest.parameters if p.kind == "rest" and p.name not in missing]
    if not all(_same_bits(tensors[name], store.snapshot(name, step)) for name in rest):
        return False
    if step == 0 or store.weights_kept_at(step):
        return all(_same_bits(tensors[name], store.snapshot(name, step)) for name in names)
    neighbours = [neighbour for neighbour in (step - 1, step + 1) if neighbour <= store.steps]
    return all(samples != _kept_samples(store, names, neighbour) for neighbour in neighbours)


def foreign_frozen(store: Store, step: int, model: nn.Module) -> str | None:
    """The first frozen parameter of a model whose fingerprint is not the recorded one; None if all agree."""
    parameters = dict(model.named_parameters())
    for name in store.not_kept(step):
        if hexadecimal(parameters[name]) != store.manifest.frozen[name]:
            return name
    return None


def check_samples(store: Store, view: StoreView, only: Sequence[str] | None = None) -> dict[str, Agreement]:
    """Compare the entries that were kept at a step with rebuilt ones, of all parameters or ``only`` some."""
    agreements = {}
    wanted = list(store.parameters) if only is None else only
    preconditioned = split_by_group(store, view, [name for name in preconditioned_parameters(store) if name in wanted])
    for layer in explained_layers(store):
        for name in layer.parameters:
            if name in agreements or name not in wanted or not store.parameters[name].by_slots:
                continue
            initial = store.initial(name)
            places = sampled_entries(initial).index
            sample = bytearray(entry_samples_at(store, name, view.horizon)[0])
            actual = torch.frombuffer(sample, dtype=initial.dtype)
            first = initial.reshape(-1)[places].double()
            if name in preconditioned:
                rebuilt = preconditioned[name].total.reshape(-1)[places]
            else:
                rebuilt = _rebuilt_entries(store, layer, name, view, places.numpy())
            eps = rounding(store, view, name, initial.dtype)
            agreements[name] = agreement(actual, first, rebuilt, count_moves(store, view, name), eps)
    return agreements


def _rebuilt_entries(
    store: Store, layer: LayerInfo, name: str, view: StoreView, places: Int[np.ndarray, " k"]
) -> Float[Tensor, " k"]:
    """Some entries of a parameter, rebuilt. If it is the weight of one layer alone, no other entries are computed."""
    alone = sum(name in info.parameters for info in store.manifest.layers) == 1
    if name not in layer.weights or not alone:
        return one_parameter(store, view, name).reshape(-1)[torch.from_numpy(places)]
    start = initial_part(store, name, view.horizon).reshape(-1)[torch.from_numpy(places)]
    return start + parameter_entries(store, layer, name, view, places)


def _kept_samples(store: Store, names: Sequence[str], step: int) -> list[bytes]:
    return [entry_samples_at(store, name, step)[0] for name in names]


def _same_bits(tensor: Tensor, kept: Tensor) -> bool:
    return tensor.dtype == kept.dtype and torch.equal(tensor.detach().cpu(), kept)
