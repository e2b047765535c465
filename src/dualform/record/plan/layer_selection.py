"""Selects the layers to record. A layer that cannot be explained exactly is rejected with an error that names it."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from dualform.errors import LayerNotFound, NothingToRecord, QueryError, UnsupportedLayer
from dualform.types import Keep

from ..layers import LayerKind, computed, kind_of, refusal_of
from .parameter_owners import ParameterOwners

KEEPS = ("slots", "keys", "ledger", "keys+ledger", "nothing")


def known_layers(model: nn.Module) -> dict[str, nn.Module]:
    """All layers of a model that have a kind, and those that are rejected. Modules inside a layer do not count."""
    layers, inside = {}, set()
    for name, module in model.named_modules():
        if id(module) not in inside and (kind_of(module) or isinstance(module, nn.Bilinear)):
            layers[name] = module
            inside |= {id(part) for part in module.modules()}
    return layers


def select(
    model: nn.Module, layers: Iterable[str] | None, kept: Callable[[str], Keep], owners: ParameterOwners
) -> dict[str, tuple[nn.Module, LayerKind]]:  # fmt: skip
    """Select the layers to record, by name: those that are named, or all that an optimiser trains."""
    candidates = known_layers(model)
    chosen = _chosen_names(model, candidates, layers)
    left_out = {
        weight for name, module in candidates.items() if kept(name) == "nothing" for weight in _weight_ids(module)
    }
    selected = {}
    for name in chosen:
        module = candidates[name]
        if _weight_ids(module) & left_out:
            continue
        trained = any(parameter in owners for parameter in module.parameters())
        if layers is None and (computed(module) or not trained):
            continue  # it belongs to the rest, like any layer that no slots explain
        if reason := refusal_of(name, module):
            raise UnsupportedLayer(reason)
        if not trained:
            raise NothingToRecord(
                f"cannot record layer '{name}': none of its parameters is in the optimiser. Add them, or leave it out."
            )
        kind = kind_of(module)
        assert kind is not None
        selected[name] = module, kind
    return selected


def _chosen_names(model: nn.Module, candidates: Mapping[str, nn.Module], layers: Iterable[str] | None) -> list[str]:
    if layers is None:
        return list(candidates)
    named = [layers] if isinstance(layers, str) else list(layers)
    for name in named:
        if name not in candidates:
            raise LayerNotFound(
                f"cannot record layer '{name}': the layers of this {type(model).__name__} that can be recorded are "
                f"{list(candidates)}. Pass one of these names."
            )
    weights = {weight for name in named for weight in _weight_ids(candidates[name])}
    return [name for name, module in candidates.items() if _weight_ids(module) & weights]  # with those tied to them


def _weight_ids(module: nn.Module) -> set[int]:
    """The identities of a layer's weights, which tied layers share. A computed weight is a new tensor at every access,
    and spectral norm iterates at every access; there it is the module's identity.
    """
    if computed(module):
        return {id(module)}
    return {id(p) for name, p in module.named_parameters() if "bias" not in name}


def keep_of(model: nn.Module, keep: Keep | Mapping[str, Keep]) -> Callable[[str], Keep]:
    """A function from a layer's name to what is kept of it."""
    table: Mapping[str, Keep] = {} if isinstance(keep, str) else keep
    default: Keep = keep if isinstance(keep, str) else "slots"
    names = {name for name, _ in model.named_modules()}
    for name in table:
        if name not in names:
            raise LayerNotFound(
                f"keep names the layer '{name}', but this {type(model).__name__} has none of that name; its layers are "
                f"{list(known_layers(model))}."
            )
    for value in (default, *table.values()):
        if value not in KEEPS:
            raise QueryError(f"keep={value!r} is not known; choose one of {list(KEEPS)}.")
    return lambda name: table.get(name, default)


def axis_of(model: nn.Module, batch_dim: int | Mapping[str, int]) -> Callable[[Sequence[str], LayerKind], int]:
    """A function to the axis that counts examples, from the names of modules that share a weight and their kind."""
    table: Mapping[str, int] = {} if isinstance(batch_dim, int) else batch_dim
    default = batch_dim if isinstance(batch_dim, int) else 0
    candidates = known_layers(model)
    for name in table:
        if name not in candidates:
            raise LayerNotFound(
                f"batch_dim names the layer '{name}', but the layers of this {type(model).__name__} are "
                f"{list(candidates)}. Pass one of these names."
            )
    for axis in (default, *table.values()):
        if axis < 0:
            raise QueryError(f"batch_dim={axis} must not be negative: count the axes of the input from the front.")
    of_kind = lambda kind: default if kind.batch_dim is None else kind.batch_dim  # noqa: E731
    return lambda names, kind: next((table[name] for name in names if name in table), of_kind(kind))
