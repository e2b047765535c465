"""What will be recorded: which layers, which parameters, under which rule. Decided once, before the first step."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from torch import Tensor, nn, optim

from dualform.errors import NothingToRecord, UnsupportedLayer
from dualform.rules import Rule, rule_for
from dualform.store import STORED, bytes_a_row
from dualform.types import DType, Keep, LayerInfo, ModuleInfo, ParameterInfo, Piece

from ..layers import LayerKind, LinearMap
from .certificate_entries import CertificateEntries, choose_entries
from .layer_selection import axis_of, keep_of, known_layers, select
from .rest_reasons import no_layer, reasons_for_rest


@dataclass(frozen=True)
class HeldParameter:
    """Where a module holds a parameter: the module's own table, its name there, and its name in the model."""

    table: Mapping[str, Tensor | None]
    own: str
    name: str


@dataclass(frozen=True)
class MapUse:
    """One map of a recorded module: the layer it belongs to, and the parameters it uses."""

    layer: LayerInfo
    info: ModuleInfo
    held: tuple[HeldParameter, ...]


@dataclass(frozen=True)
class RecordedModule:
    """A module that is recorded, and its maps."""

    module: nn.Module
    kind: LayerKind
    uses: tuple[MapUse, ...]


@dataclass(frozen=True)
class RecordingPlan:
    """Layers and parameters by name, with the objects behind the names."""

    layers: tuple[LayerInfo, ...]
    parameters: tuple[ParameterInfo, ...]
    modules: tuple[RecordedModule, ...]
    tensors: Mapping[str, Tensor]
    rules: tuple[Rule | None, ...]
    """The rule of each optimiser."""
    patches: Mapping[str, CertificateEntries]
    """The entries that the certificate follows."""
    owner: dict[int, int]
    """Which optimiser has a parameter, by its id (groups may be added later)."""
    model: nn.Module
    stated: frozenset[str]
    """The layers of which the user has said which axis counts the examples."""
    demoted: tuple[str, ...] = ()
    """The parameters that were left to the rest when training showed that no linear map of their layer uses them."""

    @property
    def explained(self) -> list[str]:
        """The parameters that the slots rebuild."""
        return [p.name for p in self.parameters if p.by_slots]

    @property
    def in_ledger(self) -> list[str]:
        """The parameters that a ledger explains."""
        return [p.name for p in self.parameters if p.kind == "ledger"]

    @property
    def ledger_only(self) -> bool:
        """Whether nothing but a ledger is kept, so that nothing grows with the steps."""
        return bool(self.layers) and all(layer.keep == "ledger" for layer in self.layers)

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

    @property
    def known_rules(self) -> list[Rule]:
        """The rules of all optimisers that have one."""
        return [rule for rule in self.rules if rule is not None]

    def rule(self, name: str) -> Rule | None:
        """The rule of the optimiser that has a parameter; one that none has may be given to the first later."""
        return self.rules[self.owner.get(id(self.tensors[name]), 0)]

    def goes_with(self, name: str) -> set[str]:
        """The parameters that cannot be explained without this one: a bias alone, a weight with all of its layers."""
        names, before = {name}, set()
        while names != before:
            before = set(names)
            for layer in self.layers:
                if names & set(layer.weights):
                    names |= set(layer.parameters)
        return names

    def demote(self, reasons: Mapping[str, str]) -> "RecordingPlan":
        """The same plan with some parameters in the rest, for these reasons, and all that goes with them."""
        reasons = {other: reason for name, reason in reasons.items() for other in self.goes_with(name)} | dict(reasons)
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
        """What one row through every recorded layer takes on disk."""
        return sum(bytes_a_row(layer, STORED[dtype]) for layer in self.layers)


def make_plan(
    model: nn.Module,
    optimizers: Sequence[optim.Optimizer],
    *,
    layers: Iterable[str] | None,
    keep: Keep | Mapping[str, Keep],
    batch_dim: int | Mapping[str, int] | None,
    rules: Mapping[type, Rule] | None,
) -> RecordingPlan:
    """Look at the model and its optimisers, and refuse by name what cannot be recorded exactly."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if hasattr(model, "_orig_mod"):
        raise UnsupportedLayer(
            f"this {type(model).__name__} is compiled already, and hooks on a compiled module never fire. Record the "
            "model itself (model._orig_mod) and compile it inside the with-block."
        )
    found = tuple(None if rules is None else rule_for(optimizer, rules) for optimizer in optimizers)
    owner = {id(p): i for i, o in enumerate(optimizers) for group in o.param_groups for p in group["params"]}
    kept, axis = keep_of(model, keep), axis_of(model, 0 if batch_dim is None else batch_dim)
    selected = select(model, layers, kept, set(owner))
    modules = _modules(model, selected, kept, axis)
    infos = tuple(dict.fromkeys(use.layer for recorded in modules for use in recorded.uses))
    if not infos:
        raise NothingToRecord(no_layer(model, known_layers(model), owner))
    saved = model.state_dict()
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    kinds = _kinds(infos) if rules is not None else {}
    reasons = reasons_for_rest(model, infos, kinds, owner)
    parameters = []
    for name, tensor in tensors.items():
        rule = found[owner.get(id(tensor), 0)] if name in kinds or id(tensor) in owner else None
        kind, dtype = kinds.get(name, "rest"), str(tensor.dtype).removeprefix("torch.")
        reason = reasons[name] if kind == "rest" else ""
        parameters.append(ParameterInfo(name, kind, tuple(tensor.shape), dtype, rule.name if rule else None, reason))
    patches = choose_entries(infos, {name: tensor.shape for name, tensor in tensors.items()})
    stated = _stated(modules, batch_dim)
    return RecordingPlan(infos, tuple(parameters), tuple(modules), tensors, found, patches, owner, model, stated)


def _stated(modules: Iterable[RecordedModule], batch_dim: int | Mapping[str, int] | None) -> frozenset[str]:
    """The layers of which the user has said which axis counts the examples."""
    layers = [use.layer for recorded in modules for use in recorded.uses]
    if isinstance(batch_dim, int):  # of those that know their axis, too: it was said that nothing is unusual
        return frozenset(layer.name for layer in layers)
    named = batch_dim or {}
    return frozenset(layer.name for layer in layers if any(module.path in named for module in layer.modules))


def _modules(
    model: nn.Module,
    selected: Mapping[str, tuple[nn.Module, LayerKind]],
    kept: Callable[[str], Keep],
    axis: Callable[[Sequence[str], LayerKind], int],
) -> list[RecordedModule]:
    """All recorded modules. Maps that share their weights are one layer, under the name of the first."""
    names = {id(p): name for name, p in model.named_parameters()}
    members: dict[tuple, list[tuple[str, str, LinearMap, tuple[HeldParameter, ...]]]] = {}
    for path, (module, kind) in selected.items():
        for each in kind.maps(module):
            held = tuple(_held(module, own, names) for own in (*(w for w, _ in each.weights), *each.biases))
            weights = tuple(one.name for one in held[: len(each.weights)])
            public = f"{path}.{each.name}" if each.name else path
            members.setdefault((weights, each.indexed, each.transposed), []).append((public, path, each, held))
    uses: dict[str, list[MapUse]] = {path: [] for path in selected}
    for group in members.values():
        layer = _layer(group, selected[group[0][1]][1], kept, axis)
        for (_, path, _, held), info in zip(group, layer.modules, strict=True):
            uses[path].append(MapUse(layer, info, held))
    shared = _keep_together([use.layer for some in uses.values() for use in some])
    return [
        RecordedModule(module, kind, tuple(replace(use, layer=shared[use.layer]) for use in uses[path]))
        for path, (module, kind) in selected.items()
    ]


def _held(module: nn.Module, own: str, names: Mapping[int, str]) -> HeldParameter:
    path, _, last = own.rpartition(".")
    owner: nn.Module = attrgetter(path)(module) if path else module
    parameter = owner._parameters[last]
    return HeldParameter(owner._parameters, last, names[id(parameter)])


def _layer(
    group: Sequence[tuple[str, str, LinearMap, tuple[HeldParameter, ...]]],
    kind: LayerKind,
    kept: Callable[[str], Keep],
    axis: Callable[[Sequence[str], LayerKind], int],
) -> LayerInfo:
    first, _, each, held = group[0]
    pieces, begin = [], 0
    for (_, width), one in zip(each.weights, held, strict=False):
        pieces.append(Piece(one.name, begin, begin + width, each.transposed))
        begin += width
    return LayerInfo(
        name=first,
        kind=kind.name,
        pieces=tuple(pieces),
        d_in=each.d_in,
        d_out=each.d_out,
        modules=tuple(
            ModuleInfo(public, tuple(one.name for one in mine[len(some.weights) :]), path)
            for public, path, some, mine in group
        ),
        keep=kept(group[0][1]),
        batch_dim=axis([path for _, path, _, _ in group], kind),
        parts=each.parts,
        indexed=each.indexed,
    )


def _keep_together(layers: Sequence[LayerInfo]) -> dict[LayerInfo, LayerInfo]:
    """Layers that share a parameter (an embedding tied to the output) are kept alike if one of them has a ledger."""
    in_ledger = {name for layer in layers if layer.in_ledger for name in layer.parameters}
    return {
        layer: replace(layer, keep="ledger") if in_ledger & set(layer.parameters) and not layer.in_ledger else layer
        for layer in layers
    }


def _without_biases(layer: LayerInfo, names: Collection[str]) -> LayerInfo:
    """The same layer, without some of its biases."""
    modules = (replace(each, biases=tuple(b for b in each.biases if b not in names)) for each in layer.modules)
    return replace(layer, modules=tuple(modules))


def _kinds(layers: Iterable[LayerInfo]) -> dict[str, str]:
    """The kind of each parameter: one of which some layer keeps too little belongs to the rest."""
    kinds: dict[str, str] = {}
    for layer in layers:
        for name in layer.parameters:
            kind = "weight" if name in layer.weights else "bias"
            kind = "ledger" if layer.in_ledger else kind if layer.keep == "slots" else "rest"
            kinds[name] = "rest" if kinds.get(name) == "rest" else kind
    return {name: kind for name, kind in kinds.items() if kind != "rest"}
