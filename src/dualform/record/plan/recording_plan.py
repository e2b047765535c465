"""The plan of a recording: which layers, which parameters, under which rule. Made once, before the first step."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, NamedTuple

from torch import Tensor, nn, optim

from dualform.errors import NothingToRecord, UnsupportedLayer
from dualform.rules import Rule, rule_for
from dualform.store import STORED, bytes_a_row
from dualform.types import DType, Keep, LayerInfo, ModuleInfo, ParameterInfo, Piece

from ..layers import LayerKind, LinearMap
from .certificate_entries import CertificateEntries, choose_entries
from .layer_selection import axis_of, keep_of, known_layers, select
from .parameter_owners import ParameterOwners
from .rest_reasons import no_layer, reasons_for_rest

RUN_AGAIN = 'it was recorded with keep="replay", to be run again'
"""Why a parameter is not explained, where nothing but the log of the run is kept."""


@dataclass(frozen=True)
class ModuleParameter:
    """A parameter of a module: the module's table of parameters, the name there, and the name in the model."""

    table: Mapping[str, Tensor | None]
    own: str
    name: str


@dataclass(frozen=True)
class MapUse:
    """One map of a recorded module: the layer it belongs to, and the parameters it uses."""

    layer: LayerInfo
    info: ModuleInfo
    parameters: tuple[ModuleParameter, ...]


class MapOfModule(NamedTuple):
    """A map while the plan is made: its public name, the path of its module, and its parameters, weights first."""

    public: str
    path: str
    linear_map: LinearMap
    parameters: tuple[ModuleParameter, ...]

    @property
    def biases(self) -> tuple[str, ...]:
        """The names of its biases in the model."""
        return tuple(parameter.name for parameter in self.parameters[len(self.linear_map.weights) :])


@dataclass(frozen=True)
class RecordedModule:
    """A module that is recorded, its kind, and its maps."""

    module: nn.Module
    kind: LayerKind
    uses: tuple[MapUse, ...]


@dataclass(frozen=True)
class RecordingPlan:
    """Layers and parameters by name, and the objects behind the names. A plan does not change, except that
    ``owners`` grows when an optimiser gets further parameters; :meth:`demote` makes another plan.
    """

    layers: tuple[LayerInfo, ...]
    parameters: tuple[ParameterInfo, ...]
    modules: tuple[RecordedModule, ...]
    tensors: Mapping[str, Tensor]
    rules: tuple[Rule | None, ...]
    """The rule of each optimiser."""
    patches: Mapping[str, CertificateEntries]
    """The entries that the certificate follows."""
    owners: ParameterOwners
    """Which optimiser trains a parameter. The plans that :meth:`demote` makes share this object."""
    model: nn.Module
    stated: frozenset[str]
    """The layers for which the user has stated the axis of examples."""
    only_replay: bool = False
    """Whether nothing is kept but what training needs to run again."""
    demoted: tuple[str, ...] = ()
    """The parameters that were moved to the rest when training showed that no linear map of their layer uses them."""

    @property
    def explained(self) -> list[str]:
        """The parameters that can be rebuilt from slots."""
        return [p.name for p in self.parameters if p.by_slots]

    @property
    def in_ledger(self) -> list[str]:
        """The parameters that a ledger explains."""
        return [p.name for p in self.parameters if p.kind == "ledger"]

    @property
    def ledger_only(self) -> bool:
        """Whether only a ledger is kept, so that the size of the memory does not grow with the steps."""
        return bool(self.layers) and all(layer.keep == "ledger" for layer in self.layers)

    @property
    def rest(self) -> dict[str, Tensor]:
        """The parameters and buffers that no slots explain."""
        return {p.name: self.tensors[p.name] for p in self.parameters if p.kind == "rest"}

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that optimisers train."""
        return [tensor for tensor in self.tensors.values() if tensor in self.owners]

    @property
    def snapshotted(self) -> dict[str, Tensor]:
        """The parameters and buffers that are stored as snapshots: the rest, unless it can be computed again."""
        return {} if self.only_replay else self.rest

    @property
    def followed(self) -> list[str]:
        """The parameters of all recorded layers."""
        return sorted({name for layer in self.layers for name in layer.parameters})

    def parameter(self, name: str) -> nn.Parameter:
        """A parameter by its name."""
        parameter = self.tensors[name]
        assert isinstance(parameter, nn.Parameter)
        return parameter

    @property
    def known_rules(self) -> list[Rule]:
        """The rules of all optimisers that have a rule."""
        return [rule for rule in self.rules if rule is not None]

    def rule(self, name: str) -> Rule | None:
        """The rule of the optimiser that trains a parameter; of the first one, if none trains it yet."""
        return self.rules[self.owners.number_of(self.tensors[name])]

    def goes_with(self, name: str) -> set[str]:
        """The parameters that cannot be explained without this one: for a bias itself, for a weight all parameters of
        its layers.
        """
        names, before = {name}, set()
        while names != before:
            before = set(names)
            for layer in self.layers:
                if names & set(layer.weights):
                    names |= set(layer.parameters)
        return names

    def demote(self, reasons: Mapping[str, str]) -> "RecordingPlan":
        """Make a plan in which some parameters belong to the rest, each for its reason, with all that go with them."""
        extended = {member: reason for name, reason in reasons.items() for member in self.goes_with(name)}
        reasons = extended | dict(reasons)
        layers = (layer for layer in self.layers if not reasons.keys() & set(layer.weights))
        parameters = (
            replace(p, kind="rest", reason=reasons[p.name]) if p.name in reasons else p for p in self.parameters
        )  # fmt: skip
        return replace(
            self,
            layers=tuple(_without_biases(layer, reasons) for layer in layers),
            parameters=tuple(parameters),
            demoted=(*self.demoted, *reasons),
        )

    def bytes_a_row(self, dtype: DType) -> int:
        """The bytes on disk of one row that goes through every recorded layer once."""
        return sum(bytes_a_row(layer, STORED[dtype]) for layer in self.layers)


def make_plan(
    model: nn.Module,
    optimizers: Sequence[optim.Optimizer],
    *,
    layers: Iterable[str] | None,
    keep: Keep | Literal["replay"] | Mapping[str, Keep],
    batch_dim: int | Mapping[str, int] | None,
    rules: Mapping[type, Rule] | None,
) -> RecordingPlan:
    """Make a plan for a model and its optimisers. A layer that cannot be recorded exactly is rejected by an error."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if hasattr(model, "_orig_mod"):
        raise UnsupportedLayer(
            f"this {type(model).__name__} is compiled already, and hooks on a compiled module never fire. Record the "
            "model itself (model._orig_mod) and compile it inside the with-block."
        )
    rule_of_each = tuple(None if rules is None else rule_for(optimizer, rules) for optimizer in optimizers)
    owners = ParameterOwners(optimizers)
    only_replay = keep == "replay"
    kept, axis = (
        keep_of(model, "nothing" if only_replay else keep),
        axis_of(model, 0 if batch_dim is None else batch_dim),
    )
    selected = select(model, layers, kept, owners)
    modules = _modules(model, selected, kept, axis)
    infos = tuple(dict.fromkeys(use.layer for recorded in modules for use in recorded.uses))
    if not infos and not only_replay:
        raise NothingToRecord(no_layer(model, known_layers(model), owners))
    saved = model.state_dict()
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    kinds = _kinds(infos) if rules is not None else {}
    reasons = reasons_for_rest(model, infos, kinds, owners)
    if only_replay:
        reasons = dict.fromkeys(reasons, RUN_AGAIN)
    parameters = []
    for name, tensor in tensors.items():
        rule = rule_of_each[owners.number_of(tensor)] if name in kinds or tensor in owners else None
        kind, dtype = kinds.get(name, "rest"), str(tensor.dtype).removeprefix("torch.")
        reason = reasons[name] if kind == "rest" else ""
        parameters.append(ParameterInfo(name, kind, tuple(tensor.shape), dtype, rule.name if rule else None, reason))
    patches = choose_entries(infos, {name: tensor.shape for name, tensor in tensors.items()})
    stated = _layers_with_stated_axis(modules, batch_dim)
    return RecordingPlan(
        infos, tuple(parameters), tuple(modules), tensors, rule_of_each, patches, owners, model, stated, only_replay
    )  # fmt: skip


def _layers_with_stated_axis(
    modules: Iterable[RecordedModule], batch_dim: int | Mapping[str, int] | None
) -> frozenset[str]:
    """The layers for which the user has stated the axis of examples."""
    layers = [use.layer for recorded in modules for use in recorded.uses]
    if isinstance(batch_dim, int):  # also those whose kind fixes the axis: the user says that no layer is unusual
        return frozenset(layer.name for layer in layers)
    named = batch_dim or {}
    return frozenset(layer.name for layer in layers if any(module.path in named for module in layer.modules))


def _modules(
    model: nn.Module,
    selected: Mapping[str, tuple[nn.Module, LayerKind]],
    kept: Callable[[str], Keep],
    axis: Callable[[Sequence[str], LayerKind], int],
) -> list[RecordedModule]:
    """All recorded modules. Maps that share their weights are one layer, under the name of the first map."""
    names = {id(p): name for name, p in model.named_parameters()}
    members: dict[tuple, list[MapOfModule]] = {}
    for path, (module, kind) in selected.items():
        for linear_map in kind.maps(module):
            own_names = (*(name for name, _ in linear_map.weights), *linear_map.biases)
            parameters = tuple(_module_parameter(module, own, names) for own in own_names)
            weights = tuple(parameter.name for parameter in parameters[: len(linear_map.weights)])
            public = f"{path}.{linear_map.name}" if linear_map.name else path
            key = weights, linear_map.indexed, linear_map.transposed
            members.setdefault(key, []).append(MapOfModule(public, path, linear_map, parameters))
    uses: dict[str, list[MapUse]] = {path: [] for path in selected}
    for maps in members.values():
        layer = _layer(maps, selected[maps[0].path][1], kept, axis)
        for member, info in zip(maps, layer.modules, strict=True):
            uses[member.path].append(MapUse(layer, info, member.parameters))
    shared = _keep_together([use.layer for module_uses in uses.values() for use in module_uses])
    return [
        RecordedModule(module, kind, tuple(replace(use, layer=shared[use.layer]) for use in uses[path]))
        for path, (module, kind) in selected.items()
    ]


def _module_parameter(module: nn.Module, own: str, names: Mapping[int, str]) -> ModuleParameter:
    path, _, last = own.rpartition(".")
    owner: nn.Module = attrgetter(path)(module) if path else module
    parameter = owner._parameters[last]
    return ModuleParameter(owner._parameters, last, names[id(parameter)])


def _layer(
    maps: Sequence[MapOfModule],
    kind: LayerKind,
    kept: Callable[[str], Keep],
    axis: Callable[[Sequence[str], LayerKind], int],
) -> LayerInfo:
    """The layer of maps that share their weights."""
    first, linear_map = maps[0], maps[0].linear_map
    pieces, begin = [], 0
    for (_, width), parameter in zip(linear_map.weights, first.parameters, strict=False):
        pieces.append(Piece(parameter.name, begin, begin + width, linear_map.transposed))
        begin += width
    return LayerInfo(
        name=first.public,
        kind=kind.name,
        pieces=tuple(pieces),
        d_in=linear_map.d_in,
        d_out=linear_map.d_out,
        modules=tuple(ModuleInfo(member.public, member.biases, member.path) for member in maps),
        keep=kept(first.path),
        batch_dim=axis([member.path for member in maps], kind),
        parts=linear_map.parts,
        indexed=linear_map.indexed,
    )


def _keep_together(layers: Sequence[LayerInfo]) -> dict[LayerInfo, LayerInfo]:
    """By layer, the same layer with a ledger, if it shares a parameter with one that has a ledger (as an embedding that
    is tied to the output does).
    """
    in_ledger = {name for layer in layers if layer.in_ledger for name in layer.parameters}
    return {
        layer: replace(layer, keep="ledger") if in_ledger & set(layer.parameters) and not layer.in_ledger else layer
        for layer in layers
    }


def _without_biases(layer: LayerInfo, names: Collection[str]) -> LayerInfo:
    """The same layer without some of its biases."""
    modules = (replace(info, biases=tuple(b for b in info.biases if b not in names)) for info in layer.modules)
    return replace(layer, modules=tuple(modules))


def _kinds(layers: Iterable[LayerInfo]) -> dict[str, str]:
    """The kind of each explained parameter. If one of its layers keeps too little, a parameter belongs to the rest."""
    kinds: dict[str, str] = {}
    for layer in layers:
        for name in layer.parameters:
            kind = "weight" if name in layer.weights else "bias"
            kind = "ledger" if layer.in_ledger else kind if layer.keep == "slots" else "rest"
            kinds[name] = "rest" if kinds.get(name) == "rest" else kind
    return {name: kind for name, kind in kinds.items() if kind != "rest"}
