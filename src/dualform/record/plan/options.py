"""The options of ``dualform.record``, apart from those that go into the plan."""

from dataclasses import dataclass
from pathlib import Path

from dualform.store import Recipe
from dualform.types import DType


@dataclass(frozen=True)
class ReplayOptions:
    """What is kept so that training can be run again: ``only`` that, and states of up to ``budget`` bytes."""

    only: bool
    budget: int | None
    """None: as much as ten states take."""


@dataclass(frozen=True)
class RecordOptions:
    """Where and how a recording is written. The fields are the keywords of :func:`dualform.record`."""

    path: Path
    dtype: DType
    resume: int | None
    overwrite: bool
    snapshot_every: int | None
    by: str | None
    copies: int
    progress: bool
    replay: ReplayOptions | None = None
    recipe: Recipe | None = None
    """How the model is made and where its examples are, if the user said it."""
