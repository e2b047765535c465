"""What the optimiser did to each parameter, step by step: the table of steps, sorted by parameter."""

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from dualform.types import Transition

Moves = tuple[Int[np.ndarray, " k"], Float[np.ndarray, "k 6"], Float[np.ndarray, " k"]]
"""The steps at which a parameter moved, their transitions and their gradient scales."""


class Schedule:
    """The lines of each parameter."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        names, which = np.unique(table["parameter"].to_numpy(zero_copy_only=False).astype(str), return_inverse=True)
        self._rows = {str(name): np.flatnonzero(which == i) for i, name in enumerate(names)}
        self._steps, self._scale = table["step"].to_numpy(), table["scale"].to_numpy()
        self._transitions = np.stack([table[name].to_numpy() for name in Transition._fields], axis=1)

    def moves(self, parameter: str) -> Moves:
        """What happened to a parameter."""
        rows = self._rows.get(parameter, np.zeros(0, np.int64))
        return self._steps[rows], self._transitions[rows], self._scale[rows]

    def sample(self, parameter: str, step: int) -> tuple[bytes, bytes] | None:
        """The entries of a parameter and its buffer that were kept after ``step`` (or the last move before it)."""
        rows = self._rows.get(parameter, np.zeros(0, np.int64))
        at = int(np.searchsorted(self._steps[rows], step, side="right")) - 1
        if at < 0:
            return None
        row = int(rows[at])
        return self._table["sample"][row].as_py(), self._table["buffer_sample"][row].as_py()
