"""A tuned head is recorded whole: a prediction of it is an exact sum over the transfer set."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from helpers import assert_clean, assert_whole
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.models import ViT
from dualform.tuning import Probe, VisualQueryTuning, trained_parameters, with_lora


def transfer(model: nn.Module, path, steps: int = 5) -> dualform.Memory:
    """Some updates on pictures whose classes are noted."""
    torch.manual_seed(1)
    x, y = torch.randn(12, 3, 8, 8).double(), torch.arange(12) % 3
    optimizer = torch.optim.AdamW(trained_parameters(model).values(), lr=0.05)
    with dualform.record(model, optimizer, path, dtype="float64", progress=False) as tape:
        for step in range(steps):
            index = torch.arange(12).roll(step)[:6]
            tape.note(index=index, label=y[index])
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path)


def learned(rest: Sequence[str]) -> list[str]:
    """What of the rest is not frozen."""
    return [name for name in rest if not name.startswith("backbone.")]


def backbone() -> ViT:
    torch.manual_seed(0)
    return ViT(8, 4, classes=3, width=8, heads=2, layers=2).double()


def test_the_head_of_visual_query_tuning_is_a_sum_over_the_transfer_set(tmp_path):
    model = VisualQueryTuning(backbone(), 3, tokens=2).double()
    memory = transfer(model, tmp_path / "memory")
    assert_clean(memory)
    assert list(memory.layers) == ["head"] and learned(memory.certificate.rest) == ["queries"]
    assert all(error < 1e-9 for error in memory.certificate.values())
    x = torch.randn(4, 3, 8, 8).double()
    spot = memory.attend(model, x)
    torch.testing.assert_close(spot.output("head"), model(x))
    groups = spot.by("label", layer="head")
    assert_whole(groups)
    assert set(groups.names) >= {0, 1, 2}


def test_adapters_and_the_head_are_both_explained(tmp_path):
    model = VisualQueryTuning(with_lora(backbone(), 2), 3, detach_backbone=False).double()
    memory = transfer(model, tmp_path / "memory")
    assert_clean(memory)
    assert {name.rpartition(".")[2] for name in memory.layers} == {"head", "down", "up"}
    assert all(error < 1e-9 for error in memory.certificate.values()), str(memory.certificate)


def test_a_linear_probe_has_no_rest(tmp_path):
    memory = transfer(Probe(backbone(), 3).double(), tmp_path / "memory")
    assert list(memory.layers) == ["head"] and not learned(memory.certificate.rest)


def test_query_tokens_are_known_at_every_step_however_large_the_backbone_is(tmp_path):
    """Frozen parameters are kept once, so they do not make snapshots of the others rare."""
    torch.manual_seed(0)
    model = VisualQueryTuning(ViT(8, 4, classes=3, width=256, heads=2, layers=2).double(), 3, tokens=1).double()
    assert sum(each.numel() for each in model.backbone.parameters()) > 10 * 2**17  # ten times what a step may cost
    memory = transfer(model, tmp_path / "memory", 4)
    moments = [memory.at(step).held_weights()["queries"] for step in range(5)]
    assert all(not torch.equal(a, b) for a, b in pairwise(moments))
    assert torch.equal(moments[-1], model.queries.detach())
    kept = sum(file.stat().st_size for file in (tmp_path / "memory" / "snapshots").rglob("*") if file.is_file())
    assert kept < 2**18
