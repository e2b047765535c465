"""A stretch of a recorded training, run again under the recorder: its slots are on disk once more."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dualform.record import ShardLimits, Tape, record
from dualform.store import Store, outside_inference_mode
from dualform.types import DType

from .model_copy import copied
from .rerun import PassTrace, Rerun

OWN_COLUMNS = ("visit", "step", "row")
"""Columns of the visits that the recorder writes by itself."""


@dataclass(frozen=True)
class SlotOptions:
    """What is recorded when training runs again. The fields are keywords of :func:`dualform.record`."""

    layers: tuple[str, ...] | None
    dtype: DType
    batch_dim: int | Mapping[str, int] | None


class SlotRecording:
    """Runs stretches of a recorded training again under the recorder, on a copy of the model of ``rerun``."""

    def __init__(self, store: Store, rerun: Rerun, options: SlotOptions) -> None:
        self.options, self._memory, self._recipe = options, store.path, store.manifest.recipe
        model, optimizers = copied((rerun.model, rerun.optimizers), rerun.model)
        self.rerun = replace(rerun, model=model, optimizers=optimizers, weights=None, before_pass=self._note)
        self._columns = {name: _values(store.visits[name]) for name in _noted(store.visits.column_names)}
        self._tape: Tape | None = None
        self._is_whole = False
        """Whether the model stands at a complete step."""

    def go_to(self, step: int, state: Mapping[str, Any]) -> None:
        """Stand after a step, which is not before the one of a kept ``state``."""
        if not (self._is_whole and state["position"] <= self.rerun.position <= step):
            self.rerun.load(state)
        self._is_whole = False
        self.rerun.run(step)
        self._is_whole = True

    def record(self, folder: Path, end: int, limits: ShardLimits) -> Generator[int, None, None]:
        """Run up to the step ``end``, with a memory in ``folder`` as the result; yields the number of each step.

        The numbers of steps in ``limits`` count from the first one here.
        """
        options = self.options
        tape = record(
            self.rerun.model,
            self.rerun.optimizers,
            folder,
            layers=options.layers,
            dtype=options.dtype,
            batch_dim=options.batch_dim,
            rules=self.rerun.taught,
            progress=False,
        )
        tape.limits = limits
        tape.describe_like(self._memory, self._recipe)
        self._is_whole = False
        with tape:
            self._tape = tape
            try:
                while self.rerun.position < end:
                    self.rerun.run(self.rerun.position + 1)
                    yield self.rerun.position
            finally:
                self._tape = None
        self._is_whole = True

    def _note(self, one_pass: PassTrace) -> None:
        """Attach the recorded columns to the batch that comes next."""
        if self._tape is not None:
            visits = slice(one_pass.first, one_pass.first + len(one_pass.index))
            self._tape.note(**{name: values[visits] for name, values in self._columns.items()})


@contextmanager
def untouched_generator() -> Iterator[None]:
    """Run with gradients and with random numbers of one's own: the caller's generator stays where it is."""
    with outside_inference_mode(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        yield


def _noted(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in OWN_COLUMNS]


def _values(column: pa.ChunkedArray) -> np.ndarray:
    """A column of the visits as it was noted."""
    return np.array(column.to_pylist()) if pa.types.is_string(column.type) else column.to_numpy()
