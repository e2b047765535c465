"""A memory that was recorded with a noted index can be run again, bit for bit."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.replay import Rerun, difference, load_first_weights, rebuild_optimizers, step_traces

N, D, C = 24, 6, 3


@dataclass
class Case:
    optimizer: type[optim.Optimizer] = optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    model: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, C))
    clip: float | None = None
    accumulate: int = 1
    schedule: bool = False


CASES = {
    "SGD": Case(optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "AdamW": Case(),
    "Adam, amsgrad, decay": Case(optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 1e-2}),
    "clipped": Case(clip=0.05),
    "clipped, so wide that the norm rounds": Case(
        optim.SGD,
        {"lr": 0.1},
        lambda: nn.Sequential(nn.Linear(D, 999), nn.ReLU(), nn.Linear(999, 999), nn.ReLU(), nn.Linear(999, C)),
        clip=0.1,
    ),
    "accumulated": Case(accumulate=2),
    "schedule": Case(schedule=True),
    "layer norm": Case(model=lambda: nn.Sequential(nn.Linear(D, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, C))),
    "batch norm": Case(
        model=lambda: nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, C)
        )
    ),
    "RMSprop": Case(optim.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.5}),
    "NAdam": Case(optim.NAdam, {"lr": 1e-2}),
}


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") / len(batch[0])


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_training_runs_again_bit_for_bit(name, tmp_path):
    case = CASES[name]
    torch.manual_seed(0)
    x, y = torch.randn(N, D), torch.randint(C, (N,))
    model = case.model()
    blank = copy.deepcopy(model)
    optimizer = case.optimizer(model.parameters(), **case.options)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if case.schedule else None
    weights = []
    with dualform.record(model, optimizer, tmp_path / "memory", progress=False) as tape:
        for _ in range(9):
            for _ in range(case.accumulate):
                index = torch.randperm(N)[:5]
                tape.note(index=index)
                losses(model, (x[index], y[index])).sum().backward()
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
            if schedule:
                schedule.step()
            weights.append(copy.deepcopy(model.state_dict()))
    store = dualform.open(tmp_path / "memory").store
    for parameter in blank.parameters():
        nn.init.zeros_(parameter)
    load_first_weights(store, blank)
    rerun = Rerun(
        blank, rebuild_optimizers(store, blank), losses, lambda index: (x[index], y[index]), step_traces(store)
    )
    for step, expected in enumerate(weights, start=1):
        rerun.run(step)
        assert not difference(store, blank, step)
        for key, tensor in blank.state_dict().items():
            assert torch.equal(tensor, expected[key]), (step, key)
    assert rerun.clip_norm == case.clip and not rerun.held_factors


def test_other_losses_show_at_the_first_step(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(N, D), torch.randint(C, (N,))
    model = CASES["SGD"].model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "memory", progress=False) as tape:
        for _ in range(3):
            index = torch.randperm(N)[:5]
            tape.note(index=index)
            losses(model, (x[index], y[index])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    store = dualform.open(tmp_path / "memory").store
    load_first_weights(store, model)
    rerun = Rerun(
        model,
        rebuild_optimizers(store, model),
        lambda model, batch: 2 * losses(model, batch),
        lambda index: (x[index], y[index]),
        step_traces(store),
    )
    rerun.run(1)
    assert difference(store, model, 1)
