"""Which linear layers are recorded, and which are refused by name because they could not be explained exactly."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from dualform.errors import LayerNotFound, NothingToRecord, QueryError, UnsupportedLayer
from dualform.types import Keep

KEEPS = ("slots", "keys", "nothing")


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """All ``nn.Linear`` of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def select(
    model: nn.Module, layers: Iterable[str] | None, kept: Callable[[str], Keep], optimised: set[int]
) -> list[str]:  # fmt: skip
    """The names of the layers to record: the given ones, or all that the optimiser trains."""
    linear = linear_layers(model)
    chosen = _chosen(model, linear, layers)
    attention = {id(m.out_proj): name for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    embeddings = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    left_out = {_identity(module) for name, module in linear.items() if kept(name) == "nothing"}
    selected = []
    for name in chosen:
        module, inside = linear[name], attention.get(id(linear[name]))
        if _identity(module) in left_out or (inside and kept(inside) == "nothing"):
            continue
        trained = any(id(p) in optimised for p in module.parameters(recurse=False))
        if layers is None and (_computed(module) or not trained) and not inside:
            continue  # a part of the rest, like any layer that nothing explains
        if reason := _refusal(name, module, inside, embeddings.get(_identity(module))):
            raise UnsupportedLayer(reason)
        if not trained:
            raise NothingToRecord(
                f"cannot record layer '{name}': none of its parameters is in the optimiser. Add them, or leave it out."
            )
        selected.append(name)
    return selected


def _chosen(model: nn.Module, linear: Mapping[str, nn.Linear], layers: Iterable[str] | None) -> list[str]:
    if layers is None:
        return list(linear)
    named = [layers] if isinstance(layers, str) else list(layers)
    for name in named:
        if name not in linear:
            raise LayerNotFound(
                f"cannot record layer '{name}': the linear layers of this {type(model).__name__} are {list(linear)}. "
                "Pass one of these names."
            )
    same = {_identity(linear[name]) for name in named}  # a tied weight is one layer: all its modules belong to it
    return [name for name, module in linear.items() if _identity(module) in same]


def _computed(module: nn.Linear) -> bool:
    """Whether the weight is made from other parameters (weight or spectral norm) instead of being one."""
    return is_parametrized(module) or "weight" not in module._parameters


def _identity(module: nn.Linear) -> int:
    """What tells layers apart. A computed weight is a new one at each look, and spectral norm goes on by looking."""
    return id(module) if _computed(module) else id(module.weight)


def _refusal(name: str, module: nn.Linear, attention: str | None, embedding: str | None) -> str | None:
    aside = "Leave it to the rest (snapshots, unattributed) with keep={{{!r}: 'nothing'}}."
    if attention is not None:
        return (
            f"'{attention}' is an nn.MultiheadAttention, whose projections run inside one function where no hook sees "
            f"them; it cannot be recorded yet. {aside.format(attention)}"
        )
    if _computed(module):
        return (
            f"the weight of '{name}' is computed from other parameters (weight or spectral norm), so it is not what is "
            f"trained. {aside.format(name)}"
        )
    if isinstance(module, nn.LazyLinear) and isinstance(module.weight, nn.UninitializedParameter):
        return f"'{name}' is a LazyLinear without weights yet. Run one batch through the model before recording."
    if embedding is not None:
        return (
            f"the weight of '{name}' is shared with the embedding '{embedding}', which cannot be recorded yet. "
            f"{aside.format(name)}"
        )
    return None


def keep_of(model: nn.Module, keep: Keep | Mapping[str, Keep]) -> Callable[[str], Keep]:
    """What is kept of a layer, by its name."""
    table: Mapping[str, Keep] = {} if isinstance(keep, str) else keep
    default: Keep = keep if isinstance(keep, str) else "slots"
    names = {name for name, _ in model.named_modules()}
    for name in table:
        if name not in names:
            raise LayerNotFound(
                f"keep names the layer '{name}', but this {type(model).__name__} has none of that name; its linear "
                f"layers are {list(linear_layers(model))}."
            )
    for value in (default, *table.values()):
        if value not in KEEPS:
            raise QueryError(f"keep={value!r} is not known; choose one of {list(KEEPS)}.")
    return lambda name: table.get(name, default)


def axis_of(model: nn.Module, batch_dim: int | Mapping[str, int]) -> Callable[[Sequence[str]], int]:
    """The axis that counts examples, for the modules that share a weight."""
    table: Mapping[str, int] = {} if isinstance(batch_dim, int) else batch_dim
    default = batch_dim if isinstance(batch_dim, int) else 0
    linear = linear_layers(model)
    for name in table:
        if name not in linear:
            raise LayerNotFound(
                f"batch_dim names the layer '{name}', but the linear layers of this {type(model).__name__} are "
                f"{list(linear)}. Pass one of these names."
            )
    for axis in (default, *table.values()):
        if axis < 0:
            raise QueryError(f"batch_dim={axis} must not be negative: count the axes of the input from the front.")
    return lambda names: next((table[name] for name in names if name in table), default)
