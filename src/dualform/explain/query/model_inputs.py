"""Inputs of a model: the arguments they stand for, the examples they hold, and the axis that counts these."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from dualform.errors import QueryError
from dualform.store import Store
from dualform.types import LayerInfo

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


def first_axis(inputs: Any) -> int:
    """The length of the first tensor among the inputs."""
    for tensor in tensors_of(inputs):
        if tensor.ndim:
            return tensor.shape[0]
    raise QueryError(f"the inputs must hold a tensor with an axis of examples; got {type(inputs).__name__}.")


def tensors_of(inputs: Any) -> Iterator[Tensor]:
    """All tensors among the inputs, in their order."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, tuple | list | Mapping):
        for part in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from tensors_of(part)


def count_examples(inputs: Any, axes: Mapping[str, int], keys: Mapping[str, Sequence[Tensor]]) -> int:
    """The number of examples.

    It is read from a layer whose axis of examples is not the first, if there is one, else from the first axis of the
    inputs.
    """
    named = [
        x.shape[axis]
        for name, xs in keys.items()
        for x in xs
        if x.numel() and (axis := axes[name]) and x.ndim > axis + 1
    ]
    count = named[0] if named else first_axis(inputs)
    if not count:
        raise QueryError("the inputs hold no example: there is nothing to ask about.")
    return count


def axis_of_examples(store: Store, info: LayerInfo, rows: Shaped[Tensor, "..."]) -> int:
    """The axis that counts examples in the inputs of a layer: ``batch_dim``, or as it was found while recording."""
    if info.batch_dim or rows.ndim < 3 or not store.slots(info.name):
        return info.batch_dim
    return {"first": 0, "between": 1, "last": rows.ndim - 2}[store.calls(info.name).axis_of_examples]


def require_batch_axis(store: Store, inputs: Any, keys: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise if a layer took the numbers of one example, or its tokens, for a batch."""
    shapes = [tensor.shape for tensor in tensors_of(inputs) if tensor.ndim]
    for name, calls in keys.items():
        info, _ = store.layer(name)
        for rows in calls:
            if rows.ndim == 1 and (rows.shape in shapes or _many_rows(store, info.name)):
                raise _no_batch_axis(shapes, f"layer '{name}' got one row of {len(rows)} numbers, {tuple(rows.shape)}")
            if info.indexed and rows.ndim == 2 and rows.shape[:1] in shapes and _several_rows(store, info.name):
                evidence = (
                    f"layer '{name}' got {len(rows)} tokens, {tuple(rows.shape[:1])}, and was trained on sequences"
                )
                raise _no_batch_axis(shapes, evidence)


def _no_batch_axis(shapes: Sequence[torch.Size], evidence: str) -> QueryError:
    described = ", ".join(str(tuple(shape)) for shape in shapes)
    return QueryError(
        f"the inputs {described} have no axis of examples: {evidence}. Put one first, also for a single example: "
        "x[None]."
    )


def _many_rows(store: Store, layer: str) -> bool:
    """Whether a layer was trained on more than one row at a time."""
    return bool(store.slots(layer)) and bool((store.calls(layer).rows > 1).any())


def _several_rows(store: Store, layer: str) -> bool:
    """Whether every example sent several rows through a layer."""
    if not store.slots(layer):
        return False
    calls = store.calls(layer)
    return bool((calls.rows > calls.batch).all()) and bool((calls.batch > 0).all())
