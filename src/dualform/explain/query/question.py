"""A question to one layer of a memory, and the queries that it shows to the layer's slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from dualform.engine import LayerQueries, StoreView
from dualform.errors import QueryError
from dualform.store import Store
from dualform.types import LayerInfo, ModuleInfo, Score

from .capture import MapCalls


@dataclass(frozen=True)
class Question:
    """Which score of the slots of one layer is asked for: what is read, under which target, for which queries.

    The ``calls`` come from a forward pass over ``examples``, or stand for a number that is linear in the weights.
    """

    store: Store
    view: StoreView
    info: LayerInfo
    module: ModuleInfo
    target: str
    """What contributions add to."""
    examples: int
    calls: MapCalls
    score: Score
    position: int | None = None
    """Which row of each example counts; None: all of them."""

    @cached_property
    def queries(self) -> LayerQueries:
        """The inputs and directions of the layer, ready for a scan."""
        dtype = self.store.compute
        inputs, directions = self._rows(self.calls.inputs), self._rows(self.calls.directions)
        rows, directions = (tensor.cpu().to(dtype) for tensor in (inputs, directions))
        _require_finite(rows, f"what layer '{self.module.name}' sees")
        if self.score == "contribution":
            _require_finite(directions, f"the target's gradient at layer '{self.module.name}'")
        return LayerQueries(rows.flatten(0, 1), directions.flatten(0, 1), rows.shape[1])

    @property
    def outputs(self) -> Float[Tensor, "n r d_out"]:
        """What the layer makes of the queries."""
        return self._rows(self.calls.outputs)

    def _rows(self, tensors: Sequence[Tensor]) -> Shaped[Tensor, "n r d"]:
        """The rows of each example that count."""
        rows, position = _rows_by_example(self.info.name, tensors, self.calls.axis, self.examples), self.position
        if position is None:
            return rows
        if not -rows.shape[1] <= position < rows.shape[1]:
            raise QueryError(
                f"position {position} is not among the {rows.shape[1]} rows that an example sends through this layer."
            )
        return rows[:, position % rows.shape[1]].unsqueeze(1)


def is_preconditioned(store: Store, info: LayerInfo) -> bool:
    """Whether a preconditioned rule (Adam and its like) explains the weights of a layer."""
    return any(store.is_preconditioned(name) for name in info.weights)


def _rows_by_example(layer: str, tensors: Sequence[Tensor], axis: int, examples: int) -> Shaped[Tensor, "n r d"]:
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


def _require_finite(rows: Float[Tensor, "n r d"], description: str) -> None:
    bad = (~rows.isfinite()).flatten(1).any(1)
    if bad.any():
        query = int(bad.nonzero()[0])
        raise QueryError(f"{description} of query {query} holds NaN or infinity, so no score of it is a number.")
