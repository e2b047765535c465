"""From one forward pass to the queries of one layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from dualform.engine import LayerQueries
from dualform.errors import QueryError
from dualform.types import LayerInfo, ModuleInfo, Score

from .capture import Capture
from .example_axis import rows_of


@dataclass(frozen=True)
class LayerQuestion:
    """One question to one layer: the pass over the queries, and which rows of it count."""

    info: LayerInfo
    module: ModuleInfo
    score: Score
    position: int | None
    found: Capture

    @property
    def target(self) -> str:
        """What contributions add to."""
        return self.found.target

    @property
    def inputs(self) -> Shaped[Tensor, "n r k"]:
        """What the layer saw of each example."""
        return self._rows(self.found.seen[self.module.name].inputs)

    @property
    def outputs(self) -> Float[Tensor, "n r d_out"]:
        """What the layer made of it."""
        return self._rows(self.found.seen[self.module.name].outputs)

    @property
    def directions(self) -> Float[Tensor, "n r d_out"]:
        """The gradient of the target at these outputs."""
        return self._rows(self.found.seen[self.module.name].directions)

    def queries(self, dtype: torch.dtype) -> LayerQueries:
        """The rows, ready for a scan."""
        rows, directions = (t.cpu().to(dtype) for t in (self.inputs, self.directions))
        _finite(rows, f"what layer '{self.module.name}' sees")
        if self.score == "contribution":
            _finite(directions, f"the target's gradient at layer '{self.module.name}'")
        return LayerQueries(rows.flatten(0, 1), directions.flatten(0, 1), rows.shape[1])

    def _by_example(self, tensors: Sequence[Tensor]) -> Shaped[Tensor, "n r d"]:
        axis = self.found.seen[self.module.name].axis
        return rows_of(self.info.name, tensors, axis, self.found.examples)

    def _rows(self, tensors: Sequence[Tensor]) -> Shaped[Tensor, "n r d"]:
        rows, position = self._by_example(tensors), self.position
        if position is None:
            return rows
        if not -rows.shape[1] <= position < rows.shape[1]:
            raise QueryError(
                f"position {position} is not among the {rows.shape[1]} rows that an example sends through this layer."
            )
        return rows[:, position % rows.shape[1]].unsqueeze(1)


def _finite(rows: Float[Tensor, "n r d"], what: str) -> None:
    bad = (~rows.isfinite()).flatten(1).any(1)
    if bad.any():
        query = int(bad.nonzero()[0])
        raise QueryError(f"{what} of query {query} holds NaN or infinity, so no score of it is a number.")
