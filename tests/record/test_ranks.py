"""Several processes train one model under ``torchrun``: they record the same as one process alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers import close
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from together import CASES, OPTIMISERS, REFUSED, WORLD, draw, train

import dualform
from dualform.errors import CorruptMemory, NotAMemory, ResumeError

BAR = 1e-9

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

every_case = pytest.mark.parametrize("name", CASES)
with_slots = pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.ledger])
with_a_ledger = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ledger])


def launch(script: Path, *args: object, world: int = WORLD, timeout: int = 300) -> subprocess.CompletedProcess:
    """Run a script in several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return subprocess.run(
        [*command, str(script), *map(str, args)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


SCRIPT = Path(__file__).parent / "together.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where several processes have recorded all cases: once for all workers that run tests side by side."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "together"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            done = launch(SCRIPT, folder)
            assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """All cases, recorded by several processes and by one: both memories, and the weights after every step."""
    kept = {}

    def get(name: str):
        if name not in kept:
            path = tmp_path_factory.mktemp("alone") / "memory"
            states = train(CASES[name], path)
            kept[name] = dualform.open(folder / name), dualform.open(path), states
        return kept[name]

    return get


@every_case
def test_the_weights_of_all_steps_are_explained(name, runs):
    several, alone, states = runs(name)
    assert several.step == alone.step == CASES[name].steps
    assert not several.certificate.marks
    bar = 1e-3 if "float16" in name else BAR
    assert several.certificate.worst < bar
    for key, tensor in several.weights().items():
        close(tensor, states[-1][key], bar)


@with_slots
def test_all_steps_can_be_read(name, runs):
    several, _, states = runs(name)
    for step in range(0, len(states), 1 + len(states) // 10):
        for key, tensor in several.at(step).weights().items():
            close(tensor, states[step][key], 1e-3 if "float16" in name else BAR)


@with_slots
def test_visits_are_those_of_one_process(name, runs):
    several, alone, _ = runs(name)
    assert several.visits.to_pylist() == alone.visits.to_pylist()


@with_slots
def test_answers_are_those_of_one_process(name, runs):
    several, alone, _ = runs(name)
    model = CASES[name].about.model()
    several.load_into(model)
    x, _ = draw(CASES[name].about, torch.Generator().manual_seed(9))
    joint, single = (memory.attend(model, x, target=0) for memory in (several, alone))
    bar = 1e-3 if "float16" in name else BAR
    for layer in several.layers:
        for score in ("abs", "contribution"):
            a, b = (spot.by("index", layer=layer, score=score, progress=False) for spot in (joint, single))
            assert a.names == b.names
            close(a.values, b.values, bar)
        a, b = (spot.top(5, layer=layer, progress=False, per="slot") for spot in (joint, single))
        close(a.contribution, b.contribution, bar)
        close(joint.output(layer, progress=False), single.output(layer, progress=False), bar)


@every_case
def test_ledgers_are_those_of_one_process(name, runs):
    several, alone, _ = runs(name)
    joint, single = (memory.ledger("source", progress=False) for memory in (several, alone))
    assert set(joint) == set(single)
    for group in joint:
        for key, part in joint[group].items():
            close(part, single[group][key], 1e-3 if "float16" in name else BAR)


@with_a_ledger
def test_a_ledger_counts_the_visits_of_all(name, runs):
    several, alone, _ = runs(name)
    assert several.visits.to_pylist() == alone.visits.to_pylist()


def test_each_process_wrote_its_own_part(runs):
    several, alone, _ = runs("many shards")
    own = [shard for shard in several.store.manifest.shards if shard.visits]
    assert len({name.startswith("ranks/0001/") for shard in own for name in shard.files}) == WORLD
    assert len(own) > 2 * WORLD  # several shards each
    assert {(shard.first, shard.last) for shard in own[::2]} == {(shard.first, shard.last) for shard in own[1::2]}
    assert several.store.slots("body") == alone.store.slots("body")


# ---------------------------------------------------------------- what cannot work

SAID = {
    "without_averaging": [("RecordError", "DistributedDataParallel")] * WORLD,
    "onto_a_memory": [("MemoryExists", "already holds a memory of 1 steps"), ("RecordError", "process 0 cannot go on")],
    "to_paths_of_their_own": [("RecordError", "the same path")] * WORLD,
    "with_other_columns": [("NoteError", "different columns")] * WORLD,
    "from_a_step_that_is_not_there": [("ResumeError", "complete steps up to 1")] * WORLD,
    "to_be_run_again": [("RecordError", "this training has several")] * WORLD,
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_process_raises_the_error_of_one(name, folder):
    for rank, (kind, sentence) in enumerate(SAID[name]):
        message = json.loads((folder / f"said-{rank}.json").read_text())[name]
        assert message[0] == kind
        assert sentence in message[1]


def test_processes_with_paths_of_their_own_record_alone(folder):
    for rank in range(WORLD):
        memory = dualform.open(folder / "alone" / str(rank))
        assert memory.store.manifest.ranks == 1
        assert memory.step == 1
        assert not memory.certificate.marks


def test_a_part_that_is_missing_is_named(folder, tmp_path):
    shutil.copytree(folder / "SGD", tmp_path / "memory")
    (tmp_path / "memory" / "ranks" / "0001" / "manifest.json").unlink()
    with pytest.raises(CorruptMemory, match="process 1 cannot be read"):
        dualform.open(tmp_path / "memory")


def test_a_part_alone_is_not_a_memory(folder):
    with pytest.raises(NotAMemory, match=r"Open the folder of all processes: .*SGD\.$"):
        dualform.open(folder / "SGD" / "ranks" / "0001")


def test_one_process_cannot_go_on_with_a_memory_of_several(folder, tmp_path):
    shutil.copytree(folder / "SGD", tmp_path / "memory")
    model = CASES["SGD"].about.model()
    dualform.open(tmp_path / "memory").load_into(model)
    with pytest.raises(ResumeError, match=r"another number of processes \(now 1, recorded 2\)"):
        dualform.record(
            model, OPTIMISERS["SGD"](model), tmp_path / "memory", dtype="float64", resume=6, progress=False
        ).__enter__()


def test_a_memory_of_one_takes_the_place_of_a_memory_of_several(folder, tmp_path):
    shutil.copytree(folder / "SGD", tmp_path / "memory")
    model = CASES["SGD"].about.model()
    with dualform.record(model, OPTIMISERS["SGD"](model), tmp_path / "memory", overwrite=True, progress=False):
        pass
    assert dualform.open(tmp_path / "memory").store.manifest.ranks == 1
    assert not list((tmp_path / "memory" / "ranks").rglob("*.*et*"))


def test_after_a_kill_the_memory_stands_at_a_step_that_all_have_taken(tmp_path):
    done = launch(SCRIPT, tmp_path, "killed")
    assert done.returncode != 0
    memory = dualform.open(tmp_path / "killed")
    assert 1 <= memory.step <= 40
    for name, tensor in memory.weights().items():
        close(tensor, torch.load(tmp_path / f"{memory.step}.pt")[name], BAR)
