"""Influence through training is what changes when training is really done again with another weight of an example."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.replay import PassTrace, Rerun, StepTrace, influences

N, D, C = 12, 5, 3


@dataclass
class Setting:
    optimizer: Callable[[list[nn.Parameter]], optim.Optimizer]
    model: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C))
    clip_norm: float | None = None
    passes: int = 1
    steps: int = 7


def of(kind: type[optim.Optimizer], **options) -> Callable[[list[nn.Parameter]], optim.Optimizer]:
    return lambda parameters: kind(parameters, **options)


SETTINGS = {
    "SGD": Setting(of(optim.SGD, lr=0.2)),
    "momentum, decay": Setting(of(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.1)),
    "nesterov": Setting(of(optim.SGD, lr=0.1, momentum=0.8, nesterov=True)),
    "Adam": Setting(of(optim.Adam, lr=0.05)),
    "Adam, decay": Setting(of(optim.Adam, lr=0.05, weight_decay=0.01)),
    "AdamW": Setting(of(optim.AdamW, lr=0.05, weight_decay=0.1)),
    "NAdam": Setting(of(optim.NAdam, lr=0.05)),
    "RMSprop": Setting(of(optim.RMSprop, lr=0.01, momentum=0.5, centered=True)),
    "Adagrad": Setting(of(optim.Adagrad, lr=0.1)),
    "clipped": Setting(of(optim.SGD, lr=0.5, momentum=0.5), clip_norm=0.05),
    "accumulated": Setting(of(optim.AdamW, lr=0.05), passes=2),
    "batch norm": Setting(
        of(optim.SGD, lr=0.1, momentum=0.5),
        lambda: nn.Sequential(nn.Linear(D, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, C)),
    ),
    "dropout": Setting(
        of(optim.AdamW, lr=0.05), lambda: nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Dropout(0.4), nn.Linear(9, C))
    ),
}  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.recurrent, self.out = kind(D, 6, batch_first=True), nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(x[:, None].expand(-1, 4, -1))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(D, 8), nn.Linear(8, C)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        places = torch.linspace(0.5, 1.5, 4, dtype=x.dtype)[:, None]
        return self.out(self.layer(self.embed(x[:, None] * places))[:, -1])


def convolutional() -> nn.Module:
    # no bias before batch normalisation: its gradient is nothing but rounding, which Adam divides by itself
    convolution = nn.Conv1d(1, 4, 3, bias=False)
    return nn.Sequential(
        nn.Unflatten(1, (1, D)),
        convolution,
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.Linear(4, C),
    )


class CalledTwice(nn.Module):
    """One layer of batch normalisation that is called twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.first(self.norm(x).tanh())).tanh())


class UsedAtTimes(nn.Module):
    """A layer that some batches pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.out(x + self.second(x).tanh() if x[:, 0].detach().sum() > 0 else x)


NETWORKS = {
    "layers used at times, Adam": Setting(of(optim.Adam, lr=0.05), UsedAtTimes, steps=12),
    "layers used at times, momentum, clipped": Setting(of(optim.SGD, lr=0.1, momentum=0.9), UsedAtTimes, 0.1, steps=12),
    "batch norm called twice": Setting(of(optim.SGD, lr=0.1), CalledTwice),
    "LSTM": Setting(of(optim.AdamW, lr=0.02), lambda: Recurrent(nn.LSTM)),
    "GRU": Setting(of(optim.AdamW, lr=0.02), lambda: Recurrent(nn.GRU)),
    "transformer with dropout": Setting(of(optim.AdamW, lr=0.02), Encoder),
    "convolution, batch norm, pooling": Setting(of(optim.AdamW, lr=0.02), convolutional),
}


def rerun_of(setting: Setting) -> tuple[Rerun, dict]:
    torch.manual_seed(0)
    model = setting.model().double()
    x, y = torch.randn(N, D).double(), torch.randint(C, (N,))
    optimizer = setting.optimizer(list(model.parameters()))
    steps = []
    for step in range(setting.steps):
        first = 4 * step * setting.passes
        passes = tuple(
            PassTrace(torch.randperm(N)[:4], torch.get_rng_state(), first + 4 * place)
            for place in range(setting.passes)
        )
        lr = optimizer.param_groups[0]["lr"] * (1 - 0.05 * step)
        steps.append(StepTrace(passes, ({"lr": lr},), setting.clip_norm))

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") / len(batch[0])

    rerun = Rerun(model, [optimizer], losses, lambda index: (x[index], y[index]), steps)
    return rerun, rerun.state()


QUERIES = torch.linspace(-1, 1, 3 * D).reshape(3, D).double()


def targets(model: nn.Module) -> Tensor:
    return model(QUERIES)[:, 0]


@pytest.mark.parametrize("setting", [pytest.param(value, id=name) for name, value in (SETTINGS | NETWORKS).items()])
def test_influence_is_the_slope_of_training_again(setting):
    rerun, first = rerun_of(setting)
    (found,) = influences(rerun, targets, [first])
    per_example = found.by_example(N)
    for example in (0, 5):
        ends = []
        for change in (1e-5, -1e-5):
            visits = torch.cat([one_pass.index for step in rerun.steps for one_pass in step.passes])
            rerun.weights = 1.0 + change * (visits == example).double()
            rerun.load(first)
            rerun.run(len(rerun.steps))
            with torch.no_grad():
                ends.append(targets(rerun.model.eval()))
            rerun.model.train()
        rerun.weights = None
        slope = (ends[0] - ends[1]) / 2e-5
        torch.testing.assert_close(per_example[:, example], slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", SETTINGS)
def test_without_curvature_and_with_what_is_shared_held_it_is_the_direct_contribution(name, tmp_path):
    """Σ over parameters of ⟨∂φ/∂W, what the example put into W⟩, as a recorded memory has it."""
    if name == "batch norm":
        pytest.skip("rows are mixed there: a slot credits the row, a loss the example")
    setting = SETTINGS[name]
    rerun, first = rerun_of(setting)
    (found,) = influences(rerun, targets, [first], ["direct"])
    direct = found.by_example(N)
    again, _ = rerun_of(setting)
    model, (optimizer,) = again.model, again.optimizers
    with dualform.record(model, optimizer, tmp_path / "memory", dtype="float64", progress=False) as tape:
        for step in again.steps:
            optimizer.param_groups[0] |= step.groups[0]
            for one_pass in step.passes:
                tape.note(index=one_pass.index)
                again.backward(one_pass)
            if step.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), step.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    parameters = dict(model.eval().named_parameters())
    slopes = [torch.autograd.grad(value, list(parameters.values()), retain_graph=True) for value in targets(model)]
    ledger = dualform.open(tmp_path / "memory").ledger("index")
    for example in ledger.groups:
        put = [ledger[example][name] for name in parameters]
        expected = [torch.stack([(a * b).sum() for a, b in zip(slope, put, strict=True)]).sum() for slope in slopes]
        torch.testing.assert_close(direct[:, example], torch.stack(expected), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", ["Adam", "batch norm"])
def test_stretches_between_kept_states_give_what_one_stretch_gives(name):
    rerun, first = rerun_of(SETTINGS[name])
    (whole,) = influences(rerun, targets, [first])
    rerun.load(first)
    states = [copy.deepcopy(first)]
    for step in (3, 5):
        rerun.run(step)
        states.append(rerun.state())
    (parts,) = influences(rerun, targets, states)
    assert torch.equal(whole.index, parts.index) and torch.equal(whole.steps, parts.steps)
    torch.testing.assert_close(parts.values, whole.values)
