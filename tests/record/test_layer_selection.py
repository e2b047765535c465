"""Selecting the layers changes nothing in the model: no weight is computed, no state advances."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from helpers import mlp, sgd, state_of, whole
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import dualform
from dualform.errors import DualformError, LayerNotFound, QueryError, RecordError, UnsupportedLayer


def record(model: nn.Module, path: Any, **options: Any) -> dualform.Tape:
    return dualform.record(model, sgd(model), path, progress=False, **options)


@pytest.mark.parametrize("norm", [spectral_norm, weight_norm])
@pytest.mark.parametrize("named", [False, True])
def test_selecting_layers_does_not_compute_a_spectral_norm(norm, named, tmp_path):
    """Spectral norm takes a step of its power iteration at every access to its weight."""
    model = nn.Sequential(OrderedDict(norm=norm(nn.Linear(4, 4)), fc=nn.Linear(4, 3)))
    before = state_of(model)
    if named:
        with pytest.raises(UnsupportedLayer, match="'norm'"):
            record(model, tmp_path, layers=["norm"])
    else:
        with record(model, tmp_path):
            pass
    for name, tensor in state_of(model).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("name", ["left", "right"])
def test_the_axis_of_a_tied_layer_may_be_given_by_any_of_its_names(name, tmp_path):
    tape = record(whole(), tmp_path, batch_dim={name: 1})
    assert {layer.name: layer.batch_dim for layer in tape.plan.layers if layer.batch_dim} == {"left": 1}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"batch_dim": -1}, QueryError, "batch_dim=-1"),
        ({"batch_dim": {"0": -2}}, QueryError, "batch_dim=-2"),
        ({"batch_dim": {"1": 1}}, LayerNotFound, r"'1'.*\['0', '2'\]"),
        ({"snapshot_every": 0}, QueryError, "snapshot_every=0"),
        ({"snapshot_every": -1}, QueryError, "snapshot_every=-1"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected_before_a_file_is_written(options, error, words, tmp_path):
    with pytest.raises(error, match=words):
        record(mlp(4, 3, 2), tmp_path / "m", **options)
    assert not (tmp_path / "m").exists()


def test_a_tape_is_used_inside_its_with_block(tmp_path):
    tape = record(mlp(4, 3, 2), tmp_path / "m")
    assert tape.step == 0
    assert_refused(tape)
    with tape:
        tape.flush()
    assert_refused(tape)


def assert_refused(tape: dualform.Tape) -> None:
    for use in (lambda: tape.note(label=1), tape.flush):
        with pytest.raises(RecordError, match="with-block"):
            use()


def test_a_recording_that_cannot_begin_leaves_nothing_on_the_model(tmp_path, monkeypatch):
    model = mlp(4, 3, 2)
    tape = record(model, tmp_path / "m")
    monkeypatch.setattr(tape, "_say", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), tape:
        pass
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(DualformError, match="already holds a memory"), record(model, tmp_path / "m"):
        pass
    with record(model, tmp_path / "m", overwrite=True):
        pass
