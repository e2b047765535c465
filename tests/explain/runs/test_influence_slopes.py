"""Influence is the slope of training again, asked as users do: recorded, opened, replayed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import QueryError
from dualform.explain import ReplayedRun
from dualform.rules.signs import LION

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

N, D, C = 16, 5, 3
STEP = 1e-6
"""The change of the weight of an example, to both sides."""

Optimizers = optim.Optimizer | list[optim.Optimizer]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C))


def by(kind: type[optim.Optimizer], **options: Any) -> Callable[[nn.Module], Optimizers]:
    return lambda model: kind(model.parameters(), **options)


@dataclass
class Loop:
    optimizer: Callable[[nn.Module], Optimizers]
    model: Callable[[], nn.Module] = mlp
    clip: float | None = None
    accumulate: int = 1
    decay: float = 1.0
    """The factor of every learning rate after each step."""
    steps: int = 9
    keep: Any = "replay"
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None
    batch: Callable[[int], Tensor] = lambda step: torch.randperm(N)[:5]

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") / (len(batch[1]) * self.accumulate)

    def record(self, path: Any) -> tuple[ReplayedRun, list[float]]:
        """The recorded run, opened again, and the norms of its gradients before they were clipped."""
        torch.manual_seed(0)
        x, y = torch.randn(N, D).double(), torch.randint(C, (N,))
        model = self.model().double()
        optimizers = self.optimizer(model)
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        schedules = [optim.lr_scheduler.ExponentialLR(optimizer, self.decay) for optimizer in optimizers]
        norms = []
        with dualform.record(
            model, optimizers, path, dtype="float64", keep=self.keep, replay=True, progress=False
        ) as tape:
            for step in range(self.steps):
                self.before_step(model, step)
                for _ in range(self.accumulate):
                    index = self.batch(step)
                    tape.note(index=index, label=y[index])
                    self.losses(model, (x[index], y[index])).sum().backward()
                if self.clip is not None:
                    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), self.clip)))
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    optimizer.step()
                    schedule.step()
                model.zero_grad()
        memory = dualform.open(path)
        return memory.replay(model, self.losses, lambda index: (x[index], y[index])), norms


QUERIES = torch.linspace(-1, 1, 3 * D).reshape(3, D).double()


def slope(run: ReplayedRun, example: int, inputs: Any = QUERIES, step: float = STEP) -> Tensor:
    """The central difference of logit 0 of networks that are really trained with two weights of an example."""
    of_example = torch.from_numpy(run.visits["index"].to_numpy() == example).double()
    outputs = []
    for change in (step, -step):
        with torch.no_grad():
            outputs.append(run.retrain(weights=1.0 + change * of_example)(inputs)[:, 0])
    return (outputs[0] - outputs[1]) / (2 * step)


def assert_slopes(run: ReplayedRun, examples: Sequence[int] = (), rtol: float = 1e-6, atol: float = 1e-9) -> None:
    assert run.check().exact, str(run.check())
    influence = run.influence(QUERIES, target=0)
    for example in examples or (int(run.examples[0]), influence.top(1)[0][0]):
        place = run.examples.tolist().index(example)
        assert float(influence.values[:, place].abs().max()) > 1e-5, "there is something to compare"
        torch.testing.assert_close(influence.values[:, place], slope(run, example), rtol=rtol, atol=atol)


OPTIMIZERS = {
    "SGD": by(optim.SGD, lr=0.2),
    "SGD momentum": by(optim.SGD, lr=0.1, momentum=0.9),
    "SGD Nesterov": by(optim.SGD, lr=0.1, momentum=0.8, nesterov=True),
    "SGD dampening decay": by(optim.SGD, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "SGD maximize": by(optim.SGD, lr=0.05, momentum=0.5, maximize=True, weight_decay=0.01),
    "Adam": by(optim.Adam, lr=0.02),
    "Adam decay maximize": by(optim.Adam, lr=0.02, weight_decay=0.01, maximize=True),
    "Adam amsgrad": by(optim.Adam, lr=0.02, amsgrad=True, betas=(0.8, 0.6)),
    "AdamW": by(optim.AdamW, lr=0.02, weight_decay=0.1),
    "AdamW amsgrad": by(optim.AdamW, lr=0.02, weight_decay=0.1, amsgrad=True, betas=(0.8, 0.6)),
    "NAdam": by(optim.NAdam, lr=0.02),
    "NAdam decoupled": by(optim.NAdam, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam before and after its switch": by(optim.RAdam, lr=0.02, weight_decay=0.01),
    "RMSprop": by(optim.RMSprop, lr=0.01),
    "RMSprop centered momentum": by(optim.RMSprop, lr=0.01, centered=True, momentum=0.5, weight_decay=0.01),
    "Adagrad": by(optim.Adagrad, lr=0.1, lr_decay=0.01),
    "Adamax": by(optim.Adamax, lr=0.02, betas=(0.9, 0.6)),
    "Adadelta": by(optim.Adadelta, lr=1.0, rho=0.8),
    "ASGD": by(optim.ASGD, lr=0.1, lambd=0.01, weight_decay=0.01),
    "Adafactor": lambda model: optim.Adafactor(model.parameters(), lr=0.05, weight_decay=0.01),  # new in torch 2.5
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_influence_is_the_slope_under_every_optimiser(name, tmp_path):
    run, _ = Loop(OPTIMIZERS[name], decay=0.95).record(tmp_path / "run")
    assert_slopes(run)


# --------------------------------------------------------------------------- steps that do not have a slope everywhere


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "amsgrad" in name or name in ("Adamax", "Adafactor")])
def test_an_optimiser_whose_steps_have_kinks_is_named_with_what_was_taken(name, tmp_path):
    influence = Loop(OPTIMIZERS[name]).record(tmp_path / "run")[0].influence(QUERIES, target=0)
    words = {"Adamax": "its maximum", "Adafactor": "the bounds of its step"}.get(name, "the maximum of amsgrad")
    assert f"Steps of {name.split()[0]} ({words}) do not have a slope everywhere" in influence.note
    assert influence.note in str(influence)


def test_an_optimiser_with_a_slope_everywhere_needs_no_note(tmp_path):
    run, _ = Loop(OPTIMIZERS["AdamW"]).record(tmp_path / "run")
    assert run.influence(QUERIES, target=0).note == "" and run.direct(QUERIES, target=0).note == ""


def test_the_maximum_of_amsgrad_binds_in_these_trainings(tmp_path):
    run, _ = Loop(OPTIMIZERS["Adam amsgrad"]).record(tmp_path / "run")
    run.check()
    (optimizer,) = run._reference.rerun.optimizers
    larger = [bool((state["max_exp_avg_sq"] > state["exp_avg_sq"]).any()) for state in optimizer.state.values()]
    assert any(larger)


def matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 7, bias=False), nn.Tanh(), nn.Linear(7, 9, bias=False), nn.Linear(9, C, False))


def muon_without_rounding(grad: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """The iterations of torch's Muon, in the precision of the gradient instead of bfloat16."""
    a, b, c = coefficients
    x = grad.T if grad.shape[0] > grad.shape[1] else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.shape[0] > grad.shape[1] else x


def test_influence_under_muon_is_the_slope_of_its_formula(tmp_path, monkeypatch):
    """Its steps are rounded to bfloat16, so only those of the formula have a slope."""
    module = pytest.importorskip("torch.optim._muon")
    run, _ = Loop(by(optim.Muon, lr=0.05), matrices).record(tmp_path / "rounded")
    assert run.check().exact
    assert "Muon (rounding to bfloat16, which is left out)" in run.influence(QUERIES, target=0).note
    monkeypatch.setattr(module, "_zeropower_via_newtonschulz", muon_without_rounding)
    assert_slopes(Loop(by(optim.Muon, lr=0.05), matrices).record(tmp_path / "run")[0])


class Lion(optim.Optimizer):
    """Chen et al. (2023), algorithm 2."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(mean.lerp(p.grad, 1 - group["betas"][0]).sign(), alpha=-group["lr"])
                    mean.lerp_(p.grad, 1 - group["betas"][1])


def record_lion(path: Any, beside: bool) -> ReplayedRun:
    """A training whose first layer is stepped by Lion, or the whole network."""
    torch.manual_seed(0)
    x, y, model = torch.randn(N, D).double(), torch.randint(C, (N,)), mlp().double()
    first = [*model.get_submodule("0").parameters()] if beside else [*model.parameters()]
    optimizers: list[optim.Optimizer] = [Lion(first)]
    if beside:
        optimizers.append(optim.Adam(model.get_submodule("2").parameters(), lr=0.02))
    loop = Loop(by(optim.SGD))
    with dualform.record(
        model, optimizers, path, dtype="float64", keep="replay", rules={Lion: LION}, progress=False
    ) as tape:
        for _ in range(9):
            index = torch.randperm(N)[:5]
            tape.note(index=index)
            loop.losses(model, (x[index], y[index])).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()

    def make(parameters: list[Any]) -> optim.Optimizer:
        return (
            Lion(parameters)
            if len(parameters) == len(first) and parameters[0].shape[0] == 7
            else optim.Adam(parameters)
        )

    return dualform.open(path).replay(model, loop.losses, lambda index: (x[index], y[index]), optimizer=make)


def test_where_all_steps_are_signs_influence_is_refused_and_the_way_out_named(tmp_path):
    run, _ = Loop(by(optim.Rprop, lr=0.01)).record(tmp_path / "rprop")
    for refused, name in ((run, "Rprop"), (record_lion(tmp_path / "lion", beside=False), "Lion")):
        assert refused.check().exact
        with pytest.raises(QueryError, match=rf"{name} steps by the signs of gradients.*run\.direct.*run\.retrain"):
            refused.influence(QUERIES, target=0)
        assert float(refused.direct(QUERIES, target=0).values.abs().max()) > 0
        comparison = refused.compare(QUERIES, without="step = 3", target=0, progress=False)
        assert bool((comparison.predicted == 0).all()) and f"{name} (signs, whose slope is 0)" in str(comparison)


def test_signs_of_one_optimiser_leave_the_slopes_of_another(tmp_path):
    lion = record_lion(tmp_path / "lion", beside=True)
    rprop, _ = Loop(
        lambda model: [
            optim.Adam(model.get_submodule("0").parameters(), lr=0.02),
            optim.Rprop(model.get_submodule("2").parameters(), lr=0.01),
        ]
    ).record(tmp_path / "rprop")
    for run, name in ((lion, "Lion"), (rprop, "Rprop")):
        assert_slopes(run)
        assert f"{name} (signs, whose slope is 0)" in run.influence(QUERIES, target=0).note


def test_entries_whose_squared_gradient_underflows_have_a_finite_influence(tmp_path):
    """In float32 the square of 1e-25 is 0, and a root has no slope there: as for an entry that never had a gradient."""
    torch.manual_seed(0)
    x, y = torch.randn(N, D), torch.randint(C, (N,))
    x[:, 0] *= 1e-25
    model = mlp()
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    with dualform.record(model, optimizer, tmp_path / "run", keep="replay", progress=False) as tape:
        for _ in range(5):
            index = torch.randperm(N)[:5]
            tape.note(index=index)
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    loop = Loop(by(optim.Adam))
    run = dualform.open(tmp_path / "run").replay(model, loop.losses, lambda index: (x[index], y[index]))
    assert bool(run.influence(QUERIES.float(), target=0).values.isfinite().all())
    assert bool(run.influence(QUERIES[:1].float(), target=0).values.isfinite().all())


# ------------------------------------------------------------------------------------------------------------- networks


def batch_norm(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(D, 7), nn.BatchNorm1d(7, **options), nn.Tanh(), nn.Linear(7, C))


def instance_norm() -> nn.Module:
    norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Linear(D, 8), nn.Unflatten(1, (2, 4)), norm, nn.Flatten(), nn.Tanh(), nn.Linear(8, C))


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, 7)), nn.Tanh(), nn.Linear(7, C))


def other_norms() -> nn.Module:
    groups = nn.Sequential(nn.Linear(D, 8), nn.GroupNorm(2, 8), nn.PReLU(), nn.Unflatten(1, (2, 4)))
    return nn.Sequential(
        groups, nn.ConvTranspose1d(2, 3, 2), nn.LayerNorm(5), nn.Flatten(), nn.SiLU(), nn.Linear(15, C)
    )


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, C)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x).tanh()).tanh())


class KeepsActivations(nn.Module):
    """Leaves a tensor of its graph behind, which torch cannot copy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(D, 6), nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        self.last = [self.first(x).tanh()]
        return self.out(self.last[0])


def in_groups(model: nn.Module) -> optim.Optimizer:
    first, last = model.get_submodule("0"), model.get_submodule("2")
    groups = [
        {"params": first.parameters(), "lr": 0.05},
        {"params": last.parameters(), "weight_decay": 0.3, "betas": (0.5, 0.7)},
    ]
    return optim.AdamW(groups, lr=0.02)


def two_optimizers(model: nn.Module) -> list[optim.Optimizer]:
    first, last = model.get_submodule("0"), model.get_submodule("2")
    return [optim.SGD(first.parameters(), lr=0.2, momentum=0.9), optim.AdamW(last.parameters(), lr=0.02)]


def freeze_first(model: nn.Module, step: int) -> None:
    model.get_submodule("0").requires_grad_(step < 4)


def unfreeze_first(model: nn.Module, step: int) -> None:
    model.get_submodule("0").requires_grad_(step >= 4)


def fix_statistics(model: nn.Module, step: int) -> None:
    model.get_submodule("1").train(step < 4)


SGD, ADAM = by(optim.SGD, lr=0.1, momentum=0.5), by(optim.Adam, lr=0.02)
LOOPS = {
    "batch norm": Loop(SGD, batch_norm()),
    "batch norm with the mean of all batches": Loop(SGD, batch_norm(momentum=None)),
    "batch norm without scale": Loop(SGD, batch_norm(affine=False)),
    "batch norm whose statistics are fixed midway": Loop(SGD, batch_norm(), before_step=fix_statistics),
    "instance norm": Loop(ADAM, instance_norm),
    "dropout": Loop(ADAM, lambda: nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Dropout(0.4), nn.Linear(9, C))),
    "accumulation": Loop(ADAM, accumulate=3),
    "accumulation and batch norm": Loop(SGD, batch_norm(), accumulate=2),
    "clipping at some steps": Loop(SGD, clip=0.5),
    "clipping at some steps, Adam": Loop(ADAM, clip=0.5),
    "a norm of many digits": Loop(SGD, clip=0.51234567),
    "clipping by parameters that nobody steps": Loop(
        lambda model: optim.SGD(model.get_submodule("2").parameters(), lr=0.2), clip=0.4
    ),
    "groups, schedule, clipping": Loop(in_groups, decay=0.9, clip=0.4),
    "two optimisers, schedule, clipping": Loop(two_optimizers, decay=0.9, clip=0.4),
    "tied weights": Loop(ADAM, Tied, clip=0.4),
    "frozen midway": Loop(ADAM, before_step=freeze_first),
    "trained from midway on": Loop(ADAM, before_step=unfreeze_first),
    "an example twice in a batch": Loop(ADAM, batch=lambda step: torch.tensor([1, 1, 2, 3 + step, 1])),
    "activations that stay": Loop(ADAM, KeepsActivations),
    "weight norm": Loop(ADAM, weight_norm),
    "norms of groups and layers": Loop(ADAM, other_norms),
    "slots are kept too": Loop(ADAM, keep="slots", clip=0.5),
}


@pytest.mark.parametrize("name", LOOPS)
def test_influence_is_the_slope_in_every_loop(name, tmp_path):
    run, norms = LOOPS[name].record(tmp_path / "run")
    if "some steps" in name:
        assert min(norms) < 0.5 < max(norms)
    assert_slopes(run)
    assert run.influence(QUERIES, target=0).note == ""


@pytest.mark.parametrize(
    "name", ["frozen midway", "batch norm whose statistics are fixed midway", "clipping at some steps"]
)
def test_a_tight_budget_changes_no_slope(name, tmp_path):
    """Then passes are run again for their graphs, from what they read the first time."""
    run, _ = LOOPS[name].record(tmp_path / "run")
    wide = run.influence(QUERIES, target=0)
    run._budget = 1
    torch.testing.assert_close(run.influence(QUERIES, target=0).per_visit, wide.per_visit, rtol=1e-9, atol=1e-13)
