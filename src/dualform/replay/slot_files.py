"""The slots of a training that is run again: files within a budget of bytes, made again when they are needed.

All of training runs once under the recorder. Of the files of slots that do not fit into the budget the beginning stays,
and the rest of the budget goes to those that were used last: most questions read all slots in the order of training,
and a file that always went just before it is read again would never help. A missing file is made again, with as many of
its neighbours as there is room for, from the nearest kept state before it. It must come out with the checksum of the
first time.
"""

import shutil
import threading
import warnings
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from dualform.errors import DualformWarning, QueryError, StoreError
from dualform.record import ShardLimits
from dualform.store import FileEntry, Shard, map_tensors, outside_inference_mode, read_manifest

from .rerun import bytes_of_state
from .slot_recording import SlotRecording, untouched_generator

STATE_BYTES = 1 << 29
"""The most bytes of states that are kept in memory, to begin stretches from; there are at least a few."""

FEW_STATES = 4

ROTATED = 0.125
"""The part of the budget that goes to the files that were used last."""


class SlotFiles:
    """Gives the slots of every shard of a replayed run, from a file that is there or is made again now. It is called
    by a :class:`~dualform.store.Store`.

    ``folder`` belongs to it and is removed by :meth:`close`, or when nothing refers to it any more.
    """

    def __init__(self, recording: SlotRecording, folder: Path, budget: int) -> None:
        self.recording, self.folder, self.budget = recording, folder, budget
        self.memory = folder / "memory"
        self.states: list[dict[str, Any]] = []
        """States of the training at ends of shards, in the order of steps."""
        self._apart = 1
        """How many shards lie between two kept states."""
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """The bytes of the files that are there, the one that was used last at the end."""
        self._mapped: dict[str, dict[str, Tensor]] = {}
        self._shards: list[Shard] = []
        self._ends: dict[str, int] = {}
        """For each file the bytes of all slots up to its end."""
        self._total = self._largest = self._begun = 0
        """The bytes of all slots and of the largest file, and how many files the recorder has begun."""
        self._last = -1
        """The number of the shard that was asked for last."""
        self._too_large: QueryError | None = None
        self._lock = threading.RLock()
        self.close = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        """Remove all files. Slots cannot be asked for after that."""

    # ------------------------------------------------------------------------------------------- all of training

    def record_all(self, steps: int) -> Generator[int, None, None]:
        """Run all of training under the recorder, from where it stands; yields the number of each step."""
        self.states, shards = [self.recording.rerun.state()], 0
        limits = ShardLimits(size=self.budget // 4, before_writing=self._room_for_new)
        with closing(self.recording.record(self.memory, steps, limits)) as recorded_steps:
            for step in recorded_steps:
                if self._too_large is not None:
                    raise self._too_large
                if self._begun != shards and step < steps:
                    shards = self._begun
                    self._keep_state(shards)
                yield step
        if self._too_large is not None:
            raise self._too_large
        self._take_stock()
        self._shards = [shard for shard in read_manifest(self.memory).shards if shard.file("shards")]

    def _keep_state(self, shards: int) -> None:
        """Keep the state after so many shards; where states become too many, every second one goes."""
        if shards % self._apart:
            return
        self.states.append(self.recording.rerun.state())
        if len(self.states) > max(FEW_STATES, STATE_BYTES // max(1, bytes_of_state(self.states[0]))):
            self.states = self.states[::2]
            self._apart *= 2

    def _room_for_new(self, size: int) -> None:
        """A shard is about to be written for the first time; the one before it is complete."""
        self._take_stock()
        self._begun += 1
        if size > self.budget and self._too_large is None:
            self._too_large = QueryError(
                f"budget={self.budget:,} bytes is too small: the slots of a few steps take {size:,} bytes, and they "
                "must fit. Give more, or name fewer layers: run.slots(budget='1 GB', layers=[…])."
            )
        if self._too_large is None:
            self._make_room(size)

    def _take_stock(self) -> None:
        """Learn of the files that the recorder has written since."""
        for file in sorted((self.memory / "shards").glob("*.safetensors")):
            name = f"shards/{file.name}"
            if name not in self._ends:
                self._sizes[name] = file.stat().st_size
                self._total += self._sizes[name]
                self._ends[name] = self._total
                self._largest = max(self._largest, self._sizes[name])

    # ------------------------------------------------------------------------------------------- questions

    def __call__(self, shard: Shard) -> dict[str, Tensor]:
        """The slots of a shard."""
        name, _ = _slot_file(shard)
        with self._lock:
            if not self.close.alive:
                raise StoreError(
                    "the slots of this run were removed by run.close(). Make them again: run.slots(), or run.attend(…)."
                )
            number = bisect_right(self._shards, shard.first, key=lambda listed: listed.first) - 1
            if name not in self._sizes:
                self._make_again(number, backwards=number < self._last)
            self._last = number
            self._sizes.move_to_end(name)
            if name not in self._mapped:
                with outside_inference_mode():
                    self._mapped[name] = map_tensors(self.memory / name)
            return self._mapped[name]

    @property
    def bytes(self) -> int:
        """The bytes of the files of slots that are there."""
        return sum(self._sizes.values())

    @property
    def total(self) -> int:
        """The bytes of all slots."""
        return self._total

    def _make_again(self, number: int, backwards: bool) -> None:
        """Make a missing file again, and missing ones next to it as far as there is room."""
        stays = sum(size for name, size in self._sizes.items() if self._stays(name))
        stretch = self._missing_from(number, backwards, self.budget - stays)
        self._make_room(sum(_slot_file(shard)[1].bytes for shard in stretch))
        folder = self.folder / "again"
        try:
            with untouched_generator(), warnings.catch_warnings():
                warnings.simplefilter("ignore", DualformWarning)  # all of training was recorded and warned about
                for shard, file in zip(stretch, self._record_again(folder, stretch), strict=True):
                    name, entry = _slot_file(shard)
                    file.replace(self.memory / name)
                    self._sizes[name] = entry.bytes
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _missing_from(self, number: int, backwards: bool, room: int) -> list[Shard]:
        """A missing shard and those after it (or before it) that are missing, too, and fit."""
        stretch: list[Shard] = []
        for i in range(number, -1, -1) if backwards else range(number, len(self._shards)):
            name, entry = _slot_file(self._shards[i])
            room -= entry.bytes
            if stretch and (name in self._sizes or room < 0):
                break
            stretch.append(self._shards[i])
        return stretch[::-1] if backwards else stretch

    def _record_again(self, folder: Path, stretch: Sequence[Shard]) -> list[Path]:
        """Run a stretch of shards again; returns the files of their slots, which are what they were."""
        before = stretch[0].first - 1
        state = self.states[bisect_right(self.states, before, key=lambda kept: kept["position"]) - 1]
        self.recording.go_to(before, state)
        limits = ShardLimits(ends=frozenset(shard.last - before for shard in stretch))
        with closing(self.recording.record(folder, stretch[-1].last, limits)) as recorded_steps:
            for _ in recorded_steps:
                pass
        files = [_slot_file(shard) for shard in read_manifest(folder).shards if shard.file("shards")]
        for i, shard in enumerate(stretch):
            if i >= len(files) or files[i][1] != _slot_file(shard)[1]:
                raise StoreError(
                    f"steps {shard.first} to {shard.last} did not come out the second time as they did the first time: "
                    "training is not repeatable bit for bit here (another number of threads, a device without "
                    "deterministic kernels, losses or data with random numbers of their own). Give a budget that holds "
                    f"all slots: run.slots(budget={self._total})."
                )
        return [folder / name for name, _ in files]

    # ------------------------------------------------------------------------------------------- the budget

    def _make_room(self, size: int) -> None:
        """Remove files until one more of this size fits: of those that do not stay, the one unused for longest."""
        used = self.bytes
        order = [name for name in self._sizes if not self._stays(name)]
        order += [name for name in self._sizes if self._stays(name)][::-1]
        for name in order:
            if used + size <= self.budget:
                return
            used -= self._sizes.pop(name)
            self._mapped.pop(name, None)
            (self.memory / name).unlink()

    def _stays(self, name: str) -> bool:
        """Whether a file belongs to the beginning, which stays."""
        return self._ends[name] <= self.budget - max(int(ROTATED * self.budget), 2 * self._largest)


def _slot_file(shard: Shard) -> tuple[str, FileEntry]:
    """The file of the slots of a shard: its name, its size and its checksum."""
    name = shard.file("shards")
    assert name is not None
    return name, shard.files[name]
