"""What will be recorded: which layers, which parameters, under which rule. Decided once, before the first step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn, optim

from dualform.errors import NothingToRecord, UnsupportedLayer, UnsupportedOptimizer
from dualform.memory import STORED
from dualform.rules import Rule, rule_for
from dualform.types import DType, Keep, LayerInfo, ModuleInfo, ParameterInfo

from .select import axis_of, keep_of, linear_layers, select


@dataclass(frozen=True)
class Plan:
    """Layers and parameters by name, with the objects behind the names."""

    layers: tuple[LayerInfo, ...]
    parameters: tuple[ParameterInfo, ...]
    modules: Mapping[str, nn.Linear]
    tensors: Mapping[str, Tensor]
    rules: tuple[Rule | None, ...]
    """The rule of each optimiser."""
    optimised: set[int]
    """The ids of all parameters that an optimiser has (groups may be added later)."""

    @property
    def explained(self) -> list[str]:
        """The parameters that the slots rebuild."""
        return [p.name for p in self.parameters if p.kind != "rest"]

    @property
    def rest(self) -> dict[str, Tensor]:
        """The parameters and buffers that are kept as snapshots."""
        return {p.name: self.tensors[p.name] for p in self.parameters if p.kind == "rest"}

    @property
    def followed(self) -> list[str]:
        """The parameters of all recorded layers."""
        return sorted({name for layer in self.layers for name in layer.parameters})

    def parameter(self, name: str) -> nn.Parameter:
        """A parameter by its name."""
        parameter = self.tensors[name]
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def bytes_a_row(self, dtype: DType) -> int:
        """What one row through every recorded layer takes on disk."""
        return sum(layer.numbers_a_row for layer in self.layers) * STORED[dtype].itemsize


def make_plan(
    model: nn.Module,
    optimizers: Sequence[optim.Optimizer],
    *,
    layers: Iterable[str] | None,
    keep: Keep | Mapping[str, Keep],
    batch_dim: int | Mapping[str, int],
    rules: Mapping[type, Rule] | None,
) -> Plan:
    """Look at the model and its optimisers, and refuse by name what cannot be recorded exactly."""
    if hasattr(model, "_orig_mod"):
        raise UnsupportedLayer(
            f"this {type(model).__name__} is compiled already, and hooks on a compiled module never fire. Record the "
            "model itself (model._orig_mod) and compile it inside the with-block."
        )
    found = tuple(None if rules is None else rule_for(optimizer, rules) for optimizer in optimizers)
    owner = {id(p): i for i, o in enumerate(optimizers) for group in o.param_groups for p in group["params"]}
    kept, axis = keep_of(model, keep), axis_of(model, batch_dim)
    selected = select(model, layers, kept, set(owner))
    infos = _layers(model, selected, kept, axis)
    if not infos:
        raise NothingToRecord(
            f"no linear layer of this {type(model).__name__} has a parameter in the optimiser (its linear layers: "
            f"{list(linear_layers(model))}). Pass the optimiser that trains them."
        )
    saved = model.state_dict()
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    for info in infos:
        _one_optimizer(info, {owner[id(tensors[n])] for n in info.parameters if id(tensors[n]) in owner})
    kinds = _kinds(infos) if rules is not None else {}
    parameters = []
    for name, tensor in tensors.items():
        rule = found[owner[id(tensor)]] if id(tensor) in owner else None
        dtype = str(tensor.dtype).removeprefix("torch.")
        parameters.append(
            ParameterInfo(name, kinds.get(name, "rest"), tuple(tensor.shape), dtype, rule.name if rule else None)
        )
    linear = linear_layers(model)
    return Plan(tuple(infos), tuple(parameters), {n: linear[n] for n in selected}, tensors, found, set(owner))


def _layers(
    model: nn.Module, selected: Sequence[str], kept: Callable[[str], Keep], axis: Callable[[Sequence[str]], int]
) -> list[LayerInfo]:  # fmt: skip
    """Modules that share a weight are one layer, under the name of the first."""
    linear, names = linear_layers(model), {id(p): name for name, p in model.named_parameters()}
    members: dict[int, list[str]] = {}
    for name in selected:
        members.setdefault(id(linear[name].weight), []).append(name)
    infos = []
    for group in members.values():
        first, module = group[0], linear[group[0]]
        biases = [linear[name].bias for name in group]
        infos.append(
            LayerInfo(
                name=first,
                weight=names[id(module.weight)],
                d_in=module.in_features,
                d_out=module.out_features,
                modules=tuple(
                    ModuleInfo(name, None if bias is None else names[id(bias)])
                    for name, bias in zip(group, biases, strict=True)
                ),
                keep=kept(first),
                batch_dim=axis(group),
            )
        )
    return infos


def _kinds(layers: Iterable[LayerInfo]) -> dict[str, Literal["weight", "bias"]]:
    kinds: dict[str, Literal["weight", "bias"]] = {}
    for layer in layers:
        if layer.keep == "slots":
            kinds |= {name: "weight" if name == layer.weight else "bias" for name in layer.parameters}
    return kinds


def _one_optimizer(layer: LayerInfo, owners: set[int]) -> None:
    if len(owners) > 1:
        raise UnsupportedOptimizer(
            f"the weight and the bias of '{layer.name}' are in different optimisers, so its slots would belong to two "
            "steps. Put them into one optimiser (two parameter groups are fine), or leave the layer out with "
            f"keep={{{layer.name!r}: 'nothing'}}."
        )
