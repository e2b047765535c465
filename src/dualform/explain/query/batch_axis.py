"""Which axis counts the examples, and an axis that was forgotten: one example alone, where a model takes a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from dualform.errors import QueryError
from dualform.store import Store
from dualform.types import LayerInfo

from .example_axis import tensors_of


def axis_of_examples(store: Store, info: LayerInfo, rows: Shaped[Tensor, "..."]) -> int:
    """The axis of what a layer got that counts examples: as ``batch_dim`` said, or as it was found while recording."""
    if info.batch_dim or rows.ndim < 3 or not store.slots(info.name):
        return info.batch_dim
    return {"first": 0, "between": 1, "last": rows.ndim - 2}[store.calls(info.name).axis_of_examples]


def require_batch_axis(store: Store, inputs: Any, seen: Mapping[str, Sequence[Tensor]]) -> None:
    """See that no layer took the numbers of one example, or its tokens, for a batch."""
    shapes = [tensor.shape for tensor in tensors_of(inputs) if tensor.ndim]
    for name, calls in seen.items():
        info, _ = store.layer(name)
        for rows in calls:
            if rows.ndim == 1 and (rows.shape in shapes or _many_rows(store, info.name)):
                raise _forgotten(shapes, f"layer '{name}' got one row of {len(rows)} numbers, {tuple(rows.shape)}")
            if info.indexed and rows.ndim == 2 and rows.shape[:1] in shapes and _several_rows(store, info.name):
                what = f"layer '{name}' got {len(rows)} tokens, {tuple(rows.shape[:1])}, and was trained on sequences"
                raise _forgotten(shapes, what)


def _forgotten(shapes: Sequence[torch.Size], what: str) -> QueryError:
    given = ", ".join(str(tuple(shape)) for shape in shapes)
    return QueryError(
        f"the inputs {given} have no axis of examples: {what}. Put one first, also for a single example: x[None]."
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
