"""Which axis counts the examples: that of the inputs, and of what each layer sees of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from dualform.errors import QueryError


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


def count_examples(inputs: Any, axes: Mapping[str, int], seen: Mapping[str, Sequence[Tensor]]) -> int:
    """How many examples there are: along the axis that counts them in a layer where that is another one than the
    first, else along the inputs' first.
    """
    named = [
        x.shape[axis]
        for name, xs in seen.items()
        for x in xs
        if x.numel() and (axis := axes[name]) and x.ndim > axis + 1
    ]
    count = named[0] if named else first_axis(inputs)
    if not count:
        raise QueryError("the inputs hold no example: there is nothing to ask about.")
    return count


def rows_of(layer: str, tensors: Sequence[Tensor], axis: int, examples: int) -> Shaped[Tensor, "n r d"]:
    """Example by example, all rows of all calls; one row an example where the ``axis`` counts something else."""
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
