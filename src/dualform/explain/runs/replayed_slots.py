"""A memory of a run that kept no slots: they are made by running it again, within a budget of bytes."""

import tempfile
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from dualform.engine import StoreView
from dualform.errors import QueryError, warn
from dualform.progress import Progress, bar
from dualform.replay import SlotFiles, SlotOptions, SlotRecording, copied, difference, untouched_generator
from dualform.sizes import bytes_of
from dualform.store import STORED, Store
from dualform.types import DType

from .answers import RunCheck
from .reference import WORTH_A_BAR, Differences, ReferenceRun

if TYPE_CHECKING:
    from ..memory import Memory


@dataclass(frozen=True)
class ReplayedSlots:
    """The memory that a run was given again, its files, the trained model, and how the run came out."""

    memory: "Memory"
    files: SlotFiles
    trained: nn.Module
    check: RunCheck

    def warn(self) -> None:
        """Warn if this is not the recorded run."""
        if not self.check.exact:
            warn(f"{self.check} Its answers are about this run.")


def replay_slots(
    reference: ReferenceRun,
    *,
    budget: int | str,
    layers: Iterable[str] | None,
    dtype: DType | None,
    batch_dim: int | Mapping[str, int] | None,
    folder: str | Path | None,
    progress: Progress,
) -> ReplayedSlots:
    """Run all of training again under the recorder. If that fails, nothing is left on disk."""
    store, steps = reference.store, len(reference.rerun.steps)
    dtype = store.manifest.dtype if dtype is None else dtype
    if dtype not in STORED:
        raise QueryError(f"dtype={dtype!r} is not known; choose one of {list(STORED)}.")
    names = None if layers is None else ((layers,) if isinstance(layers, str) else tuple(layers))
    recording = SlotRecording(store, reference.rerun, SlotOptions(names, dtype, batch_dim))
    size = bytes_of("budget", budget)
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    files = SlotFiles(recording, Path(tempfile.mkdtemp(prefix="dualform-slots-", dir=folder)), size)
    differences = Differences(1, steps)
    try:
        with untouched_generator(), bar("running training again", steps, progress, WORTH_A_BAR) as watch:
            recording.go_to(0, reference.first)
            with closing(files.record_all(steps)) as recorded_steps:
                for step in recorded_steps:
                    differences.add(step, difference(store, recording.rerun.model, step))
                    if watch:
                        watch(1)
        trained = copied(recording.rerun.model).eval()
        memory = _memory(Store(files.memory, supply=files))
    except BaseException:
        files.close()
        raise
    return ReplayedSlots(memory, files, trained, differences.check(reference.likely_reason))


def _memory(store: Store) -> "Memory":
    from ..memory import Memory  # which imports this room

    return Memory(store, StoreView(store.steps))
