"""Trainers wrap optimisers; the optimiser inside the wrapper is recorded."""

from contextlib import nullcontext

import pytest
import torch
from helpers import assert_clean, assert_rebuilt, batches, mlp, state_of
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.record.plan.wrapped_optimizers import unwrapped

DATA = batches(6, 4, 5, 3)


def accelerated(path=None) -> nn.Module:
    """Training with accelerate's wrapped optimiser: two batches a step."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # a trainer of another test may have left
    accelerate.state.GradientState._reset_state()  # its own behind: they belong to the process
    model = mlp(5, 4, 3)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, optim.AdamW(model.parameters(), lr=1e-2))
    recording = nullcontext() if path is None else dualform.record(
        model, optimizer, path, dtype="float64", progress=False
    )  # fmt: skip
    with recording:
        for x, y in DATA:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return model


def test_only_the_steps_that_an_accelerated_optimiser_takes_are_recorded(tmp_path):
    bare, model = accelerated(), accelerated(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(state_of(bare).values(), state_of(model).values(), strict=True))
    memory = dualform.open(tmp_path)
    assert memory.step == 3
    assert_clean(memory)
    assert_rebuilt(memory, model)


@pytest.mark.parametrize("module", ["lightning.pytorch.core.optimizer", "lightning.fabric.wrappers"])
def test_the_optimiser_inside_of_lightnings_is_found(module):
    wrappers = pytest.importorskip(module)
    inner = optim.SGD(mlp(2, 2).parameters())
    outer = wrappers._FabricOptimizer(inner, None) if "fabric" in module else wrappers.LightningOptimizer(inner)
    assert unwrapped(outer) is inner
    assert unwrapped(inner) is inner


def test_a_manual_loop_of_lightning_may_record_its_own_optimiser(tmp_path):
    wrappers = pytest.importorskip("lightning.pytorch.core.optimizer")
    model = mlp(5, 4, 3)
    inner = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, wrappers.LightningOptimizer(inner), tmp_path, dtype="float64", progress=False):
        for x, y in DATA:
            F.cross_entropy(model(x), y).backward()
            inner.step()
            inner.zero_grad()
    assert_rebuilt(dualform.open(tmp_path), model)
