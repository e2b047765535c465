"""Which axis counts the examples, in the inputs and in what each layer sees, and what to do if there is none."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from dualform.errors import QueryError
from dualform.store import Store
from dualform.types import LayerInfo


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


def rows_of(layer: str, tensors: Sequence[Tensor], axis: int, examples: int) -> Shaped[Tensor, "n r d"]:
    """All rows of all calls, example by example; each row is an example where the ``axis`` counts something else."""
    if not tensors:
        raise QueryError(f"layer '{layer}' was not used in this forward pass, so there is nothing to ask it.")
    if not any(tensor.numel() for tensor in tensors):
        raise QueryError(
            f"layer '{layer}' got no row of these inputs (a gate sent none there), so there is nothing to ask it."
        )
    parts = []
    for t in tensors:
        if t.ndim <= axis + 1 or t.shape[axis] != examples:
            return torch.cat([t.reshape(-1, 1, t.shape[-1]) for t in tensors])
        parts.append(t.movedim(axis, 0).reshape(examples, -1, t.shape[-1]))
    return torch.cat(parts, 1)


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
