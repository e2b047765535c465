"""Which layers are recorded, and which are refused by name because they could not be explained exactly."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from dualform.errors import LayerNotFound, NothingToRecord, QueryError, UnsupportedLayer
from dualform.types import Keep

from ..layers import LayerKind, computed, kind_of, refusal_of

KEEPS = ("slots", "keys", "ledger", "keys+ledger", "nothing")


def known_layers(model: nn.Module) -> dict[str, nn.Module]:
    """All layers of a model that are of a kind to be recorded (or refused by name). Parts of one are no others."""
    found, inside = {}, set()
    for name, module in model.named_modules():
        if id(module) not in inside and (kind_of(module) or isinstance(module, nn.Bilinear)):
            found[name] = module
            inside |= {id(part) for part in module.modules()}
    return found


def select(
    model: nn.Module, layers: Iterable[str] | None, kept: Callable[[str], Keep], optimised: set[int]
) -> dict[str, tuple[nn.Module, LayerKind]]:  # fmt: skip
    """The layers to record, by name: the given ones, or all that the optimiser trains."""
    known = known_layers(model)
    chosen = _chosen(model, known, layers)
    left_out = {weight for name, module in known.items() if kept(name) == "nothing" for weight in _identity(module)}
    selected = {}
    for name in chosen:
        module = known[name]
        if _identity(module) & left_out:
            continue
        trained = any(id(p) in optimised for p in module.parameters())
        if layers is None and (computed(module) or not trained):
            continue  # a part of the rest, like any layer that nothing explains
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


def _chosen(model: nn.Module, known: Mapping[str, nn.Module], layers: Iterable[str] | None) -> list[str]:
    if layers is None:
        return list(known)
    named = [layers] if isinstance(layers, str) else list(layers)
    for name in named:
        if name not in known:
            raise LayerNotFound(
                f"cannot record layer '{name}': the layers of this {type(model).__name__} that can be are "
                f"{list(known)}. Pass one of these names."
            )
    same = {weight for name in named for weight in _identity(known[name])}  # what is tied belongs together
    return [name for name, module in known.items() if _identity(module) & same]


def _identity(module: nn.Module) -> set[int]:
    """What tells layers apart: their weights. A computed weight is a new one at each look, and spectral norm goes on
    by looking.
    """
    if computed(module):
        return {id(module)}
    return {id(p) for name, p in module.named_parameters() if "bias" not in name}


def keep_of(model: nn.Module, keep: Keep | Mapping[str, Keep]) -> Callable[[str], Keep]:
    """What is kept of a layer, by its name."""
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
    """The axis that counts examples, for the modules that share a weight."""
    table: Mapping[str, int] = {} if isinstance(batch_dim, int) else batch_dim
    default = batch_dim if isinstance(batch_dim, int) else 0
    known = known_layers(model)
    for name in table:
        if name not in known:
            raise LayerNotFound(
                f"batch_dim names the layer '{name}', but the layers of this {type(model).__name__} are {list(known)}. "
                "Pass one of these names."
            )
    for axis in (default, *table.values()):
        if axis < 0:
            raise QueryError(f"batch_dim={axis} must not be negative: count the axes of the input from the front.")
    own = lambda kind: default if kind.batch_dim is None else kind.batch_dim  # noqa: E731
    return lambda names, kind: next((table[name] for name in names if name in table), own(kind))
