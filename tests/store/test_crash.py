"""Whatever instant a recording ends at, its memory stands at a complete step; and it can go on from there."""

import copy
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import batches, close, mlp, sgd, state_of
from torch.nn import functional as F

import dualform
from dualform.errors import DualformWarning, MemoryNotFound, NotAMemory
from dualform.store import Manifest

STEPS, FLUSH, BATCH = 6, 2, 3
DATA = batches(STEPS, BATCH, 5, 3)
NEAR = 1e-12
KILL = Path(__file__).parents[2] / "benchmarks" / "kill.py"


pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


class PowerCut(BaseException):
    """Nobody can catch it, so nobody tidies up."""


class Training:
    """A recorded loop that flushes every second step and then saves a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: dict[int, tuple[Any, Any]] = {}
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    def run(self, resume: int | None = None, **options: Any) -> None:
        self.model = mlp(5, 4, 3)
        self.optimizer = sgd(self.model)
        if resume:
            model, optimizer = copy.deepcopy(self.saved[resume])
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
        self.states[resume or 0] = state_of(self.model)
        with dualform.record(
            self.model, self.optimizer, self.path, dtype="float64", resume=resume, progress=False, **options
        ) as tape:
            for x, y in DATA[tape.step :]:
                tape.note(index=torch.arange(BATCH) + BATCH * tape.step, label=y)
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.states[tape.step] = state_of(self.model)
                if tape.step % FLUSH == 0:
                    tape.flush()
                    self.saved[tape.step] = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    @property
    def memory(self) -> dualform.Memory:
        return dualform.open(self.path)

    @property
    def files(self) -> set[str]:
        return {str(f.relative_to(self.path)) for f in self.path.rglob("*") if f.is_file() and f.name != ".lock"}

    @property
    def listed(self) -> set[str]:
        shards = self.memory.store.manifest.shards
        return {"manifest.json", "init.safetensors", *(name for shard in shards for name in shard.files)}


def assert_complete(training: Training) -> int:
    """The memory stands at a complete step and explains its weights, and those of every step before."""
    memory = training.memory
    assert memory.visits.num_rows == BATCH * memory.step
    for step in range(memory.step + 1):
        for name, tensor in memory.at(step).weights().items():
            close(tensor, training.states[step][name], NEAR)
    if memory.step:
        assert memory.visits["index"].to_pylist() == list(range(BATCH * memory.step))
        assert memory.certificate.worst < NEAR and memory.certificate.step == memory.step
    return memory.step


def assert_undisturbed(training: Training) -> None:
    """The run came to its end as if nothing had happened, and nothing else lies around."""
    assert assert_complete(training) == STEPS
    assert training.memory.check(training.model, full=True).worst < NEAR
    assert training.files == training.listed


@contextmanager
def power_cut(target: Any, name: str, at: int) -> Iterator[list[int]]:
    """The ``at``-th call of a function, and every later one, is a power cut; yields the count of calls."""
    original, count = getattr(target, name), [0]

    def cut(*args: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] >= at:
            raise PowerCut
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, cut)
        yield count


# ------------------------------------------------------------------------------------------------- what a crash leaves


def test_half_a_file_is_ignored_on_opening_and_removed_on_resuming(tmp_path):
    training = Training(tmp_path / "m")
    training.run()
    whole = training.files
    for part in ("shards", "calls", "visits", "steps", "snapshots"):
        (training.path / part).mkdir(exist_ok=True)
        (training.path / part / "000009.safetensors.partial").write_bytes(b"half a f")
    (training.path / "manifest.json.partial").write_text('{"checksum": ')
    assert assert_complete(training) == STEPS
    training.run(resume=STEPS)
    assert training.files == whole
    assert_undisturbed(training)


def test_a_whole_file_that_no_manifest_lists_is_ignored_on_opening_and_removed_on_resuming(tmp_path):
    training = Training(tmp_path / "m")
    training.run()
    whole = training.files
    for name in training.listed - {"manifest.json", "init.safetensors"}:
        path = training.path / name
        path.with_name("000099" + path.suffix).write_bytes(path.read_bytes())
    assert assert_complete(training) == STEPS
    training.run(resume=STEPS)
    assert training.files == whole
    assert_undisturbed(training)


@pytest.mark.parametrize("at", range(2, 6))
def test_a_crash_between_the_files_of_a_shard_and_the_manifest_loses_that_shard_alone(at, tmp_path):
    """The first manifest is written as recording begins, then one with each shard."""
    training = Training(tmp_path / "m")
    with power_cut(Manifest, "save", at) as saves, suppress(PowerCut):
        training.run()
    assert saves[0] >= at, "there should be that many manifests"
    done = (at - 2) * FLUSH
    assert assert_complete(training) == min(done, STEPS)
    assert training.files > training.listed, "the files of the lost shard"
    if not done:
        return  # going on from step 0 has its own test
    training.run(resume=done)
    assert_undisturbed(training)


MOMENTS: dict[str, tuple[Any, str]] = {
    "a file gets its name": (os, "replace"),
    "a file is forced to the disk": (os, "fsync"),
    "a file is written": (os, "write"),
}


@pytest.mark.parametrize(("target", "name"), MOMENTS.values(), ids=MOMENTS)
def test_a_power_cut_at_any_file_leaves_the_last_complete_step(target, name, tmp_path):
    """One run for each file that gets its name: what was flushed is there, and the run can be brought to its end."""
    with power_cut(target, name, 10**9) as count:
        Training(tmp_path / "whole").run()
    for at in range(1, count[0] + 1, 1 if name == "replace" else count[0] // 8):
        training = Training(tmp_path / f"at {at}")
        with power_cut(target, name, at), suppress(PowerCut):
            training.run()
        try:
            assert_complete(training)
        except NotAMemory:
            assert not training.saved and "manifest.json" not in training.files
            training.run()
        else:
            saved = max(training.saved, default=0)
            assert training.memory.step in (saved, saved + FLUSH)
            training.run(**({"resume": saved} if saved else {"overwrite": True}))
        assert_undisturbed(training)


@pytest.mark.parametrize(("target", "name"), [(os, "replace"), (Path, "unlink")], ids=["replace", "unlink"])
def test_a_power_cut_while_resuming_can_be_resumed(target, name, tmp_path):
    """Resuming drops what came after the checkpoint: first from the manifest, then from the disk."""
    training, step = Training(tmp_path / "m"), 2
    training.run()
    shutil.copytree(training.path, tmp_path / "whole")
    for at in range(1, 8):
        shutil.rmtree(training.path)
        shutil.copytree(tmp_path / "whole", training.path)
        with power_cut(target, name, at), suppress(PowerCut):
            training.run(resume=step)
        assert assert_complete(training) >= step
        training.run(resume=step)
        assert_undisturbed(training)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_power_cut_while_overwriting_leaves_the_old_memory_or_none(at, tmp_path):
    training = Training(tmp_path / "m")
    training.run()
    with power_cut(os, "replace", at), suppress(PowerCut):
        training.run(overwrite=True)
    with suppress(NotAMemory):
        assert_complete(training)
    training.run(overwrite=True)
    assert_undisturbed(training)


def test_what_the_writer_cannot_do_is_raised_in_the_loop(tmp_path):
    """The writer has a thread of its own; its troubles are the loop's, at the next call at the latest."""
    training = Training(tmp_path / "m")
    with power_cut(Manifest, "save", 3), pytest.raises(PowerCut):
        training.run()
    assert training.memory.step == FLUSH


def test_a_kill_before_the_first_step_can_be_taken_up_at_step_zero(tmp_path):
    training = Training(tmp_path / "m")
    with power_cut(Manifest, "save", 2), suppress(PowerCut):
        training.run()
    assert training.memory.step == 0
    training.run(resume=0)
    assert_undisturbed(training)


def test_a_folder_without_a_manifest_is_recorded_into_anew(tmp_path):
    training = Training(tmp_path / "m")
    with power_cut(Manifest, "save", 1), suppress(PowerCut):
        training.run()
    assert "init.safetensors" in training.files
    with pytest.raises(NotAMemory):
        dualform.open(training.path)
    training.run()
    assert_undisturbed(training)


def test_leaving_by_an_exception_saves_every_complete_step(tmp_path):
    training = Training(tmp_path / "m")

    def stop_at(step: int) -> Callable[[], None]:
        def check() -> None:
            if len(training.states) > step:
                raise KeyboardInterrupt

        return check

    check, original = stop_at(5), F.cross_entropy

    def interrupted(*args: Any) -> torch.Tensor:
        check()
        return original(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(F, "cross_entropy", interrupted)
        training.run()
    assert assert_complete(training) == 5
    assert training.files == training.listed


@pytest.mark.parametrize("where", ["get", "put"])
def test_an_interrupt_while_the_loop_waits_for_the_disk_loses_nothing(where, tmp_path, monkeypatch):
    """Control-C in the middle of handing over a shard: it is neither lost nor written twice."""
    shelf = importlib.import_module("dualform.record.shards.shard_builder")
    monkeypatch.setattr(shelf, "SHARD_BYTES", 1)  # a shard a step
    model, calls = mlp(5, 4, 3), []
    optimizer = sgd(model)

    def interrupted(method):
        def call(*args):
            calls.append(args)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return method(*args)

        return call

    with (
        pytest.raises(KeyboardInterrupt),
        dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape,
    ):
        if where == "get":
            arenas = tape._recorder.shard_builder._arenas
            slow = SimpleNamespace(get=interrupted(arenas.get), put=arenas.put)
            monkeypatch.setattr(tape._recorder.shard_builder, "_arenas", slow)
        else:
            monkeypatch.setattr(
                tape._recorder.shard_builder.writer, "put", interrupted(tape._recorder.shard_builder.writer.put)
            )
        for x, y in DATA:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert memory.step == 3 and [shard.last for shard in memory.store.manifest.shards] == [1, 2, 3]
    assert memory.store.slots("0") == 3 * BATCH
    assert memory.check(model, full=True).worst < NEAR


def test_an_open_memory_stands_still_while_recording_goes_on(tmp_path):
    """A reader sees the steps that were there when it opened the memory."""
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    found, states = [], []
    with dualform.record(model, optimizer, tmp_path / "m", dtype="float64", progress=False) as tape:
        for x, y in DATA:
            tape.note(label=y)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            tape.flush()
            found.append(dualform.open(tmp_path / "m"))
            states.append(state_of(model))
    for step, (memory, state) in enumerate(zip(found, states, strict=True), start=1):
        assert memory.step == step
        for name, tensor in memory.weights().items():
            close(tensor, state[name], NEAR)


def test_a_warning_says_that_complete_steps_were_lost_when_the_loop_fails_for_another_reason(tmp_path):
    """The loop's own error is what the user sees; that the disk failed too must not be silent."""
    from dualform.errors import WriteError

    training, files = Training(tmp_path / "m"), importlib.import_module("dualform.store.io.atomic_file")

    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.warns(DualformWarning, match=r"not written.*the disk is full"), pytest.raises(ZeroDivisionError):
        model = mlp(5, 4, 3)
        optimizer = sgd(model)
        with dualform.record(model, optimizer, training.path, progress=False) as tape:
            x, y = DATA[0]
            tape.note(label=y)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(files.os, "replace", refuse)
                with pytest.raises(WriteError):
                    tape.flush()
            raise ZeroDivisionError
    assert training.memory.step == 0
    assert not list(training.path.rglob("*.partial"))


# -------------------------------------------------------------------------------------------------------------- killed


@pytest.mark.skipif(not KILL.exists(), reason="the benchmarks are not part of a source distribution")
def test_killed_equals_the_last_complete_step():
    """Of a real process; ``python benchmarks/kill.py`` kills twenty and more."""
    found = subprocess.run(
        [sys.executable, str(KILL), "--kills", "1"], capture_output=True, text=True, check=False, timeout=300
    )
    assert found.returncode == 0 and "1 passed, 0 failed" in found.stdout, found.stdout + found.stderr


def test_opening_a_folder_without_a_memory_is_an_error_that_says_so(tmp_path):
    with pytest.raises(MemoryNotFound, match="no such folder"):
        dualform.open(tmp_path / "m")
