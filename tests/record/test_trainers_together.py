"""Trainers in several processes: stopped and resumed, they record the same as in one process."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import close

sys.path.insert(0, str(Path(__file__).parent))

import trainers_together
from test_ranks import WORLD, launch
from trainers_together import BATCH, STEPS, TRAINERS

import dualform

BAR = 1e-9

PACKAGES = {"hf": ("transformers", "accelerate"), "lightning": ("lightning",)}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_records_the_same_in_several_processes_as_in_one(name, tmp_path):
    for package in PACKAGES[name]:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (extra: {name})")
    folders = {world: tmp_path / str(world) for world in (1, WORLD)}
    for world, folder in folders.items():
        folder.mkdir()
        done = launch(Path(trainers_together.__file__), folder, name, world=world)
        assert done.returncode == 0, done.stderr[-4000:]
    alone, several = (dualform.open(folder / "memory") for folder in folders.values())
    assert (alone.store.manifest.ranks, several.store.manifest.ranks) == (1, WORLD)
    assert several.step == alone.step == STEPS
    assert not several.certificate.marks
    assert several.certificate.worst < BAR
    order = [("step", "ascending"), ("index", "ascending")]
    visits = [memory.visits.select(["step", "index", "source"]).sort_by(order) for memory in (alone, several)]
    assert visits[0].equals(visits[1])
    assert len(visits[0]) == 2 * BATCH * STEPS
    single, joint = (memory.ledger("index", progress=False) for memory in (alone, several))
    for index in single:
        for key, part in single[index].items():
            close(part, joint[index][key], BAR)
    for key, tensor in several.weights(progress=False).items():
        close(tensor, alone.weights(progress=False)[key], BAR)
