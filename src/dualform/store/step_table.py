"""What the optimiser did to each parameter, step by step: the table of steps, sorted by parameter."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from dualform.types import Transition

from .format import SETTING


class ParameterSteps(NamedTuple):
    """The steps at which a parameter moved, their transitions and gradient scales, and the settings they read."""

    steps: Int[np.ndarray, " k"]
    transitions: Float[np.ndarray, "k 11"]
    scale: Float[np.ndarray, " k"]
    settings: Mapping[str, Float[np.ndarray, " k"]]

    def find(self, step: int) -> int | None:
        """The place of a step; None if the parameter did not move."""
        at = int(np.searchsorted(self.steps, step))
        return at if at < len(self.steps) and self.steps[at] == step else None

    def settings_at(self, at: int) -> dict[str, float]:
        """The settings of a move."""
        return {name: float(values[at]) for name, values in self.settings.items() if not np.isnan(values[at])}


NO_MOVES = ParameterSteps(np.zeros(0, np.int64), np.zeros((0, len(Transition._fields))), np.zeros(0), {})


class StepTable:
    """The lines of each parameter."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        names, which = np.unique(table["parameter"].to_numpy(zero_copy_only=False).astype(str), return_inverse=True)
        self._rows = {str(name): np.flatnonzero(which == i) for i, name in enumerate(names)}
        self._steps, self._scale = table["step"].to_numpy(), table["scale"].to_numpy()
        self._transitions = np.stack([table[name].to_numpy() for name in Transition._fields], axis=1)
        self._settings = {
            name.removeprefix(SETTING): table[name].to_numpy()
            for name in table.column_names
            if name.startswith(SETTING)
        }

    def moves(self, parameter: str) -> ParameterSteps:
        """What happened to a parameter."""
        rows = self._rows.get(parameter, np.zeros(0, np.int64))
        settings = {name: values[rows] for name, values in self._settings.items()}
        return ParameterSteps(self._steps[rows], self._transitions[rows], self._scale[rows], settings)

    def gradient_eps(self, parameter: str, step: int) -> float:
        """The machine precision of a parameter's gradients up to ``step``, as the root of their mean square; 0 in a
        memory that does not tell.
        """
        if "gradient_eps" not in self._table.column_names:
            return 0.0
        rows = self._rows.get(parameter, np.zeros(0, np.int64))
        eps = np.nan_to_num(self._table["gradient_eps"].to_numpy()[rows[self._steps[rows] <= step]])
        return float(np.sqrt(np.mean(eps**2))) if len(eps) else 0.0

    def sample(self, parameter: str, step: int) -> tuple[bytes, bytes] | None:
        """The entries of a parameter and of the optimiser's state of it that were kept after ``step`` (or after the
        last move before it).
        """
        rows = self._rows.get(parameter, np.zeros(0, np.int64))
        at = int(np.searchsorted(self._steps[rows], step, side="right")) - 1
        if at < 0:
            return None
        row = int(rows[at])
        return self._table["sample"][row].as_py(), self._table["state_sample"][row].as_py()
