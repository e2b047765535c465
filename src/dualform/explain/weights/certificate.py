"""The certificate: how exactly a memory explains the weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dualform.errors import require
from dualform.types import Mark

from ..notebook import Displayed, certificate_html


@dataclass(frozen=True)
class Certificate(Displayed, Mapping[str, float]):
    """Parameter name → ‖W − rebuilt‖ / ‖W − W₀‖: how exactly the memory explains the weights at ``step``.

    ``floor`` is the rounding error of training itself. ``rest`` are the parameters that are kept as snapshots and not
    explained, and ``reasons`` says why of each. ``marks`` lists what was noticed while recording. ``ending`` is not
    empty if the recording ended here without being closed.
    """

    step: int
    errors: Mapping[str, float]
    floor: Mapping[str, float]
    rest: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    ending: str = ""

    def __getitem__(self, name: str) -> float:
        return self.errors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.errors)

    def __len__(self) -> int:
        return len(self.errors)

    @property
    def worst(self) -> float:
        """The largest error of all parameters."""
        return max(self.errors.values(), default=0.0)

    def __str__(self) -> str:
        lines = [f"certificate at step {self.step}: ‖W − rebuilt‖ / ‖W − W₀‖ (rounding floor of training)"]
        lines += [f"  {name:<24} {error:.1e}  ({self.floor[name]:.1e})" for name, error in self.errors.items()]
        if self.rest:
            lines.append(f"  kept as snapshots, unattributed: {', '.join(self.rest)}")
        lines += [
            f"  ! '{mark.name}' from step {mark.first_step}, {mark.times}×: {mark.message}" for mark in self.marks
        ]
        if self.ending:
            lines.append(f"  {self.ending}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return certificate_html(self)

    def to_pandas(self) -> Any:
        """One line per parameter."""
        pd = require("pandas", "pandas")
        frame = pd.DataFrame({"error": dict(self.errors), "floor": dict(self.floor)})
        frame.index.name = "parameter"
        return frame
