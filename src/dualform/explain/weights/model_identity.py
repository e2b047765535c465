"""Is this the network of that step? What was kept of it tells: whole tensors, or a few entries of each weight."""

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

    The rest was kept whole. So were the explained weights at the beginning and the end; of the steps between a few
    entries are known, which tell the step unless those of its neighbours are the same.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [p.name for p in store.manifest.parameters if p.by_slots]
    booked = [p.name for p in store.manifest.parameters if p.kind == "ledger"]
    for name in booked:
        kept = store.initial(name) if step == 0 else store.kept_at(name, step)
        if kept is None or not _same(tensors[name], kept):
            return False
    found = [sampled_entries(tensors[name]).of(tensors[name]) for name in names]
    if found != _samples(store, names, step):
        return False
    if foreign_frozen(store, step, model):
        return False
    missing = set(store.not_kept(step))
    rest = [p.name for p in store.manifest.parameters if p.kind == "rest" and p.name not in missing]
    if not all(_same(tensors[name], store.snapshot(name, step)) for name in rest):
        return False
    if step == 0 or store.weights_kept_at(step):
        return all(_same(tensors[name], store.snapshot(name, step)) for name in names)
    beside = [other for other in (step - 1, step + 1) if other <= store.steps]
    return all(found != _samples(store, names, other) for other in beside)


def foreign_frozen(store: Store, step: int, model: nn.Module) -> str | None:
    """The first frozen parameter of a model that is not the recorded one, by its fingerprint; None if all are."""
    parameters = dict(model.named_parameters())
    for name in store.not_kept(step):
        if hexadecimal(parameters[name]) != store.manifest.frozen[name]:
            return name
    return None


def check_samples(store: Store, view: StoreView, only: Sequence[str] | None = None) -> dict[str, Agreement]:
    """Compare the entries that were kept at a step with those that the memory rebuilds, of all parameters or some."""
    found = {}
    wanted = list(store.parameters) if only is None else only
    shaped = split_by_group(store, view, [name for name in preconditioned_parameters(store) if name in wanted])
    for layer in explained_layers(store):
        for name in layer.parameters:
            if name in found or name not in wanted or not store.parameters[name].by_slots:
                continue
            initial = store.initial(name)
            which = sampled_entries(initial).index
            kept = bytearray(entry_samples_at(store, name, view.horizon)[0])
            actual = torch.frombuffer(kept, dtype=initial.dtype)
            first = initial.reshape(-1)[which].double()
            if name in shaped:
                built = shaped[name].total.reshape(-1)[which]
            else:
                built = _entries(store, layer, name, view, which.numpy())
            eps = rounding(store, view, name, initial.dtype)
            found[name] = agreement(actual, first, built, count_moves(store, view, name), eps)
    return found


def _entries(
    store: Store, layer: LayerInfo, name: str, view: StoreView, which: Int[np.ndarray, " k"]
) -> Float[Tensor, " k"]:
    """Some entries of a parameter, rebuilt. Of a weight no others are computed."""
    alone = sum(name in other.parameters for other in store.manifest.layers) == 1
    if name not in layer.weights or not alone:
        return one_parameter(store, view, name).reshape(-1)[torch.from_numpy(which)]
    start = initial_part(store, name, view.horizon).reshape(-1)[torch.from_numpy(which)]
    return start + parameter_entries(store, layer, name, view, which)


def _samples(store: Store, names: Sequence[str], step: int) -> list[bytes]:
    return [entry_samples_at(store, name, step)[0] for name in names]


def _same(tensor: Tensor, kept: Tensor) -> bool:
    return tensor.dtype == kept.dtype and torch.equal(tensor.detach().cpu(), kept)
