"""The parts of a layer's output that sum to the whole: what groups put into its weight and bias, and the beginning."""

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.attend import Queries, View, add_up, explained_layers, initial_part, layer_sums
from dualform.memory import Store

from .answers import Groups
from .groups import GroupOf, group_slots
from .queries import Asked


def group_parts(store: Store, asked: Asked, column: str) -> GroupOf:
    """The groups of a column, for all layers that feed the weight or the bias: a bias can be shared."""
    bias = asked.module.bias
    feeding = [
        layer.name
        for layer in store.manifest.layers
        if layer.name == asked.info.name or (bias and any(module.bias == bias for module in layer.modules))
    ]
    return group_slots(store, feeding, column)


def parts_of(
    store: Store,
    view: View,
    asked: Asked,
    queries: Queries,
    column: str,
    groups: GroupOf,
    values: Float[Tensor, "n G"],
) -> Groups:
    """The sums of a score over groups; for contributions with all else that the whole is made of."""
    answer = Groups(asked.module.name, column, asked.score, asked.target, groups.names, values)
    if asked.score != "contribution":
        return answer
    assert queries.directions is not None
    n, directions = len(queries), queries.directions.double()
    start = initial_part(store, asked.info.weight, view.horizon)
    initial = (directions * (queries.rows.double() @ start.mT)).sum(1).unflatten(0, (n, -1)).sum(1)
    pull = directions.unflatten(0, (n, -1)).sum(1)
    bias = torch.zeros_like(values)
    if asked.module.bias is not None:
        bias_start, by_group = bias_parts(store, view, asked.module.bias, column, groups)
        bias, initial = pull @ by_group.mT, initial + pull @ bias_start
    outputs = asked.outputs.flatten(0, 1).double().cpu()
    total = (directions * outputs).sum(1).unflatten(0, (n, -1)).sum(1)
    return Groups(answer.layer, column, asked.score, asked.target, groups.names, values, bias, initial, total)


def bias_parts(
    store: Store, view: View, bias: str, column: str, groups: GroupOf
) -> tuple[Float[Tensor, " d"], Float[Tensor, "G d"]]:
    """What was left of the first bias, and what each group put into it. Kept for the next question."""
    width = store.parameters[bias].shape[0]
    if store.parameters[bias].kind == "rest":
        return store.snapshot(bias, view.horizon).double(), torch.zeros(len(groups.names), width, dtype=torch.float64)
    key = ("bias", bias, column, groups.names, view.key)
    if key not in store.cache:
        total = torch.zeros(len(groups.names), width, dtype=torch.float64)
        for layer in explained_layers(store):
            term = layer_sums(store, layer, view.horizon, group_of=groups, groups=len(groups.names)).get(bias)
            if term is not None:
                add_up(store, layer.name, view, [term])
                total += term.total[:, :, 0]
        store.cache[key] = total
    return initial_part(store, bias, view.horizon), store.cache[key]
