"""A copy or a pickle of a model that is being recorded is a plain model, without anything of the recording."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from helpers import batches, mlp, sgd
from kinds import KINDS
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import dualform


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def averaged(model):
    return AveragedModel(model).module


COPIES = {"deepcopy": copy.deepcopy, "torch.save": saved_and_loaded, "AveragedModel": averaged}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_while_recording_is_a_plain_model(how, steps_before, tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        for x, y in batches(steps_before, 4, 5, 3):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        twin = COPIES[how](model)
        other = optim.SGD(twin.parameters(), lr=0.1)
        for x, y in batches(3, 4, 5, 3):  # training the copy leaves no trace in the memory
            F.cross_entropy(twin(x), y).backward()
            other.step()
        assert tape.step == steps_before
        for x, y in batches(2, 4, 5, 3):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert memory.step == steps_before + 2 and memory.check(model, full=True).worst < 1e-12
    assert not memory.certificate.marks
    copy.deepcopy(twin)(torch.zeros(1, 5, dtype=torch.float64))  # a copy of the copy, when recording is over


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_layer_can_be_copied_while_it_is_recorded(name, tmp_path):
    kind, random = KINDS[name], torch.Generator().manual_seed(0)
    model = kind.model()
    optimizer = optim.Adam(model.parameters())
    with dualform.record(model, optimizer, tmp_path, progress=False, **kind.options):
        x = kind.inputs(random)
        model(x).square().sum().backward()
        optimizer.step()
        twin = copy.deepcopy(model).eval()
        assert torch.equal(twin(x), model.eval()(x))


def test_an_optimiser_can_be_copied_while_it_is_recorded(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        net, twin = copy.deepcopy((model, optimizer))
        for x, y in batches(2, 4, 5, 3):
            F.cross_entropy(net(x), y).backward()
            twin.step()
        assert tape.step == 0


def test_a_model_saved_while_recording_loads_without_dualform(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "memory", progress=False):
        torch.save(model, tmp_path / "model.pt")
    script = (
        "import sys, torch; sys.modules['dualform'] = None; "
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); print(model(torch.ones(1, 3)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
