"""Inputs as a model's forward pass takes them: a tensor, a tuple of arguments, or a mapping."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dualform.errors import QueryError

from .model_shadow import PassThrough


def arguments_of(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that inputs stand for.

    A mapping holds keyword arguments if the forward pass takes these names, else it is itself the one argument. A tuple
    of one mapping says the latter.
    """
    inputs = usable(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    if not isinstance(inputs, Mapping):
        return (inputs,), {}
    named = {str(name): value for name, value in inputs.items()}
    signature = _signature(model)
    if signature is None or _binds(signature, **named):
        return (), named
    if _binds(signature, inputs):
        return (inputs,), {}
    raise QueryError(
        f"the inputs hold {sorted(named)}, but {type(_inner(model)).__name__}.forward takes {signature}. Give a "
        "mapping of its argument names, or a tuple of its arguments; (batch,) passes a mapping as one argument."
    )


def usable(inputs: Any) -> Any:
    """Inputs that autograd can use: copies of tensors that were made in inference mode."""
    if isinstance(inputs, Tensor):
        return inputs.clone() if inputs.is_inference() else inputs
    if isinstance(inputs, tuple):
        parts = [usable(part) for part in inputs]
        return inputs if all(a is b for a, b in zip(inputs, parts, strict=True)) else tuple(parts)
    if isinstance(inputs, Mapping):
        named = {name: usable(part) for name, part in inputs.items()}
        return inputs if all(named[name] is inputs[name] for name in named) else named
    return inputs


def _inner(model: nn.Module) -> nn.Module:
    """The network inside wrappers that pass all arguments on."""
    while isinstance(model, PassThrough):
        model = model.inner
    return model


def _signature(model: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(_inner(model).forward)
    except (TypeError, ValueError):
        return None


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
