r"""The constraints of a token selection as the solvers need them: rank-one rows that are never formed explicitly.

.. math:: \delta_r^\top W z_{i(r)} \ge b_r\ (\text{or} = b_r),\qquad \delta_r = x_{\text{plus}(r)} - x_{\text{minus}(r)}

.. math:: M(\lambda) = \sum_r \lambda_r\, \delta_r z_{i(r)}^\top,\qquad
    \langle\phi_r, \phi_s\rangle = (z_{i(r)}\cdot z_{i(s)})\,(\delta_r\cdot\delta_s)

A row is stored as three indices and a number. As a vector :math:`\phi_r = \mathrm{vec}(\delta_r z^\top)` it would have
d² numbers; everything below only needs the products of the two inner products.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

Array = np.ndarray


@dataclass(frozen=True)
class ConstraintRows:
    """Constraints on W, sorted by their query. ``equal`` rows have multipliers of either sign.

    ``place`` is the row's index in the flattened table of queries and tokens.
    """

    points: Float[Array, "p x"]
    queries: Float[Array, "n z"]
    query: Int[Array, " r"]
    plus: Int[Array, " r"]
    minus: Int[Array, " r"]
    target: Float[Array, " r"]
    equal: Bool[Array, " r"]
    place: Int[Array, " r"]

    def __len__(self) -> int:
        return len(self.query)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of W."""
        return self.points.shape[1], self.queries.shape[1]

    @cached_property
    def start(self) -> Int[Array, " m"]:
        """The index where the rows of each query begin, followed by the number of all rows."""
        return np.searchsorted(self.query, np.arange(len(self.queries) + 1))

    @cached_property
    def sizes(self) -> Float[Array, " n"]:
        """‖z‖² of each query."""
        return np.square(self.queries).sum(1)

    @cached_property
    def curvature(self) -> Float[Array, " r"]:
        """‖φ‖² of each row."""
        from .coordinate_descent import squares

        return self.sizes[self.query] * squares(self.points, self.plus, self.minus)

    @cached_property
    def low(self) -> Float[Array, " r"]:
        """The lower bound of each row's multiplier."""
        return np.where(self.equal, -np.inf, 0.0)

    @cached_property
    def busy_queries(self) -> Int[Array, " b"]:
        """The queries that have rows."""
        return np.flatnonzero(np.diff(self.start))

    def margins(self, W: Float[Array, "x z"]) -> Float[Array, " r"]:
        """δᵀWz of every row."""
        from .coordinate_descent import values

        return values(self.points, self.plus, self.minus, self.start, self.queries @ W.T)

    def combine(self, multipliers: Float[Array, " r"]) -> Float[Array, "x z"]:
        """M(λ)."""
        from .coordinate_descent import sums

        return np.ascontiguousarray(
            sums(self.points, self.plus, self.minus, self.start, multipliers).T @ self.queries
        )  # fmt: skip

    def pick(self, rows: Int[Array, " s"]) -> "ConstraintRows":
        """A selection of the rows, in the given order."""
        names = ("query", "plus", "minus", "target", "equal", "place")
        picked = replace(self, **{name: getattr(self, name)[rows] for name in names})
        picked.__dict__.update(sizes=self.sizes, curvature=self.curvature[rows], low=self.low[rows])
        return picked

    def gram(self) -> Float[Array, "r r"]:
        """All inner products of rows, as one matrix: only for a moderate number of rows."""
        deltas, at = self.points[self.plus] - self.points[self.minus], self.queries[self.query]
        return (at @ at.T) * (deltas @ deltas.T)
