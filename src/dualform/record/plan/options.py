"""What the user asked for."""

from dataclasses import dataclass
from pathlib import Path

from dualform.types import DType


@dataclass(frozen=True)
class RecordOptions:
    """The options of a recording."""

    path: Path
    dtype: DType
    resume: int | None
    overwrite: bool
    snapshot_every: int | None
    by: str | None
    copies: int
    progress: bool
