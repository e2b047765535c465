"""Copies of a model, and what a model holds beside its weights that a training may change."""

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from dualform.errors import QueryError

CopiedT = TypeVar("CopiedT")

LooseValues = dict[str, dict[str, Any]]
"""By module and name: numbers and tensors that no ``state_dict`` holds."""


def copied(value: CopiedT, holding: nn.Module | None = None) -> CopiedT:
    """A deep copy of a model, or of something that holds one. Activations that a forward pass left in it are detached.

    torch copies no tensor that is part of a graph.
    """
    model = value if holding is None else holding
    assert isinstance(model, nn.Module)
    memo: dict[int, Any] = {
        id(tensor): tensor.detach().clone()
        for module in model.modules()
        for tensor in _tensors_in(vars(module))
        if tensor.grad_fn is not None
    }
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, ValueError, RuntimeError, AttributeError, pickle.PicklingError, copy.Error) as error:
        raise QueryError(
            f"this {type(model).__name__} cannot be copied ({error}), and a training runs again on a copy of the "
            "model. Keep locks, files, generators and the like out of its attributes, or give its class a __deepcopy__."
        ) from error


def loose_values(model: nn.Module, *, buffers: bool = True) -> LooseValues:
    """The numbers and the tensors among the attributes of modules, copied; and ``buffers`` that are not persistent."""
    values: LooseValues = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key != "training" and _is_loose(value)}
        if buffers:
            own |= {key: module._buffers[key] for key in module._non_persistent_buffers_set if key in module._buffers}
        if own:
            values[name] = {
                key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in own.items()
            }
    return values


def restore_loose_values(model: nn.Module, values: LooseValues) -> None:
    """Put them back."""
    for name, module in model.named_modules():
        for key, value in values.get(name, {}).items():
            content = value.clone() if isinstance(value, Tensor) else value
            if key in module._non_persistent_buffers_set:
                module._buffers[key] = content
            else:
                vars(module)[key] = content


def changed_values(before: LooseValues, after: LooseValues) -> list[str]:
    """The names of those that differ."""
    return [
        f"{module}.{name}".lstrip(".")
        for module, values in after.items()
        for name, value in values.items()
        if not _are_equal(value, before.get(module, {}).get(name))
    ]


def _is_loose(value: Any) -> bool:
    """Whether a training may change a value, and none of its forward passes makes it anew (an activation)."""
    if isinstance(value, Tensor):
        return value.grad_fn is None and not isinstance(value, nn.Parameter)
    return isinstance(value, bool | int | float)


def _are_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and value.shape == other.shape and bool((value == other).all())
    return bool(value == other)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers, without those of submodules."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, tuple | list | set):
        for part in value:
            yield from _tensors_in(part)
