"""What the optimiser did to each parameter at each step: the table of steps, grouped by parameter."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from dualform.types import Transition

from .format import SETTING


class ParameterSteps(NamedTuple):
    """The steps that changed a parameter: their transitions, gradient scales and optimiser settings."""

    steps: Int[np.ndarray, " k"]
    transitions: Float[np.ndarray, "k 11"]
    scale: Float[np.ndarray, " k"]
    settings: Mapping[str, Float[np.ndarray, " k"]]

    def find(self, step: int) -> int | None:
        """The index of a step; None if the step did not change the parameter."""
        index = int(np.searchsorted(self.steps, step))
        return index if index < len(self.steps) and self.steps[index] == step else None

    def settings_at(self, index: int) -> dict[str, float]:
        """The optimiser settings of the step with this index."""
        return {name: float(values[index]) for name, values in self.settings.items() if not np.isnan(values[index])}


NO_STEPS = ParameterSteps(np.zeros(0, np.int64), np.zeros((0, len(Transition._fields))), np.zeros(0), {})


class StepTable:
    """The table of steps, with the lines of each parameter."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        names, name_ids = np.unique(table["parameter"].to_numpy(zero_copy_only=False).astype(str), return_inverse=True)
        self._rows = {str(name): np.flatnonzero(name_ids == i) for i, name in enumerate(names)}
        self._steps, self._scale = table["step"].to_numpy(), table["scale"].to_numpy()
        self._transitions = np.stack([table[name].to_numpy() for name in Transition._fields], axis=1)
        self._settings = {
            name.removeprefix(SETTING): table[name].to_numpy()
            for name in table.column_names
            if name.startswith(SETTING)
        }

    def parameter_steps(self, parameter: str) -> ParameterSteps:
        """The steps that changed a parameter."""
        rows = self._rows.get(parameter, np.zeros(0, np.int64))
        settings = {name: values[rows] for name, values in self._settings.items()}
        return ParameterSteps(self._steps[rows], self._transitions[rows], self._scale[rows], settings)

    def gradient_eps(self, parameter: str, step: int) -> float:
        """The machine precision of a parameter's gradients up to ``step``, as a root mean square.

        0 for a memory that did not store it.
        """
        if "gradient_eps" not in self._table.column_names:
            return 0.0
        rows = self._rows.get(parameter, np.zeros(0, np.int64))
        eps = np.nan_to_num(self._table["gradient_eps"].to_numpy()[rows[self._steps[rows] <= step]])
        return float(np.sqrt(np.mean(eps**2))) if len(eps) else 0.0

    def sample(self, parameter: str, step: int) -> tuple[bytes, bytes] | None:
        """The sampled entries of a parameter and of its optimiser state after ``step``.

        They were stored at the last step up to there that changed the parameter; None if there was none.
        """
        rows = self._rows.get(parameter, np.zeros(0, np.int64))
        index = int(np.searchsorted(self._steps[rows], step, side="right")) - 1
        if index < 0:
            return None
        row = int(rows[index])
        return self._table["sample"][row].as_py(), self._table["state_sample"][row].as_py()
