"""A training with Adam that begins at its full learning rate is told so, once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import dualform

STEPS = 25
FULL = "began without a warm-up"


def told(path, capsys, make: Callable[[Any], optim.Optimizer], rate: Callable[[int], float], progress=True) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = make(model.parameters())
    schedule = optim.lr_scheduler.LambdaLR(optimizer, rate)
    with dualform.record(model, optimizer, path, progress=progress) as tape:
        for step in range(STEPS):
            tape.note(index=torch.arange(4) + 4 * step)
            model(torch.randn(4, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.mark.parametrize("make", [optim.Adam, optim.AdamW, optim.NAdam, optim.RMSprop, optim.Adagrad])
def test_a_constant_learning_rate_is_no_warm_up(make, tmp_path, capsys):
    text = told(tmp_path / "run", capsys, lambda p: make(p, lr=0.01), lambda step: 1.0)
    assert text.count(FULL) == 1 and "after=step leaves them out" in " ".join(text.split())


@pytest.mark.parametrize(
    ("make", "rate"),
    [
        (lambda p: optim.AdamW(p, lr=0.01), lambda step: min(1.0, (step + 1) / 15)),
        (lambda p: optim.SGD(p, lr=0.01), lambda step: 1.0),
    ],
)
def test_a_warm_up_and_other_rules_are_not_mentioned(make, rate, tmp_path, capsys):
    assert FULL not in told(tmp_path / "run", capsys, make, rate)


def test_without_progress_nothing_is_said(tmp_path, capsys):
    assert FULL not in told(tmp_path / "run", capsys, lambda p: optim.AdamW(p, lr=0.01), lambda step: 1.0, False)
