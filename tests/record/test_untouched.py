"""Recorded training is unrecorded training, bit for bit, and nothing is left behind."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Whole, batches, mlp, setups, trained
from hypothesis import given
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dualform

DATA = batches(5, 4, 5, 3)


def plain(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()


def accumulated(model, optimizer, x, y):
    for part in (x, -x, 2 * x):
        F.cross_entropy(model(part), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def closure(model, optimizer, x, y):
    def closed():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closed)


def evaluated(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    model.eval()
    model(x)
    model.train()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def adversarial(model, optimizer, x, y):
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    F.cross_entropy(model((x + 0.1 * grad.sign()).detach()), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def autocast(model, optimizer, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x.float()), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def checkpointed(model, optimizer, x, y):
    F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def scaled(model, optimizer, x, y):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def noisy(model, optimizer, x, y):
    x = x + 0.1 * torch.randn_like(x) + float(np.random.normal())
    plain(model, optimizer, x, y)


def with_all(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)


def fused(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def foreach(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True, maximize=True)


def no_momentum(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters())


def float32() -> nn.Module:
    return mlp(5, 8, 3).float()


def float64() -> nn.Module:
    return mlp(5, 8, 3, inplace=True)


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)).double()


def complete() -> nn.Module:
    return Whole(dropout=0.3).double()


Make = Callable[[], nn.Module]
TABLE: list[tuple[Make, Callable, Callable, dict[str, Any]]] = [
    (float64, with_all, plain, {}),
    (float64, with_all, plain, {"dtype": "float16"}),
    (float32, with_all, plain, {"dtype": "float16"}),
    (float32, no_momentum, plain, {"dtype": "float32"}),
    (float64, with_all, clipped, {}),
    (float64, with_all, accumulated, {}),
    (float64, with_all, closure, {}),
    (float64, with_all, evaluated, {}),
    (float64, with_all, adversarial, {}),
    (float64, with_all, noisy, {}),
    (float64, with_all, checkpointed, {}),
    (float64, with_all, plain, {"keep": "keys"}),
    (float64, with_all, plain, {"layers": ["0"]}),
    (float64, fused, plain, {}),
    (float64, foreach, plain, {}),
    (float64, adam, plain, {"rules": None}),
    (float32, with_all, autocast, {"dtype": "float32"}),
    (float32, fused, scaled, {"dtype": "float16"}),
    (dropout, with_all, plain, {}),
    (dropout, with_all, checkpointed, {}),
    (complete, with_all, plain, {}),
    (complete, with_all, accumulated, {}),
    (complete, with_all, evaluated, {"dtype": "float16"}),
    (complete, with_all, noisy, {"snapshot_every": 3}),
]


def label(row: Any) -> str:
    make, optimizer, step, options = row
    return "-".join([make.__name__, optimizer.__name__, step.__name__, *map(str, options.values())])


def everything(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    """All that training may change: weights, buffers, gradients, the optimiser's state, the generators."""
    out = {f"model {name}": tensor for name, tensor in model.state_dict().items()}
    out |= {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    for i, state in optimizer.state_dict()["state"].items():
        out |= {f"optimiser {i} {k}": torch.as_tensor(v) for k, v in state.items() if v is not None}
    out["torch"] = torch.get_rng_state()
    out["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # type: ignore[index,union-attr]
    return {name: tensor.detach().clone() for name, tensor in out.items()}


def train(make, make_optimizer, step, path=None, **options):
    torch.manual_seed(7)
    np.random.seed(7)
    model = make()
    optimizer = make_optimizer(model)
    recording = nullcontext() if path is None else dualform.record(model, optimizer, path, progress=False, **options)
    trail = []
    with recording as tape:
        for x, y in DATA:
            x = x.to(next(model.parameters()).dtype)
            if tape is not None:
                tape.note(label=y)
            step(model, optimizer, x, y)
            trail.append(everything(model, optimizer))
        if tape is not None:
            tape.flush()
    return [*trail, everything(model, optimizer)]


@pytest.mark.parametrize("row", TABLE, ids=label)
def test_recorded_training_is_unrecorded_training_bit_for_bit(row, tmp_path):
    make, optimizer, step, options = row
    free, recorded = (
        train(make, optimizer, step),
        train(make, optimizer, step, tmp_path, **{"dtype": "float64", **options}),
    )
    assert len(free) == len(recorded) == len(DATA) + 1
    for one, other in zip(free, recorded, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name


@given(setup=setups())
def test_recorded_training_of_any_network_is_unrecorded_training_bit_for_bit(setup, tmp_path_factory):
    run = setup.run(tmp_path_factory.mktemp("memory"))
    model = mlp(*setup.widths, bias=setup.bias, inplace=setup.inplace, seed=setup.seed)
    optimizer = optim.SGD(model.parameters(), **setup.settings)
    for x, y in run.data:
        F.cross_entropy(model(x), y).backward()
        if setup.clip:
            nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, run.states[-1][name])
    mine, theirs = optimizer.state_dict()["state"], run.optimizer.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for i in mine:
        for name in mine[i]:
            assert (mine[i][name] is None and theirs[i][name] is None) or torch.equal(mine[i][name], theirs[i][name])


def test_no_random_number_of_python_is_drawn(tmp_path):
    """In a process of its own: the type checker of this test suite draws some itself."""
    program = f"""
        import random, torch, dualform
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = random.getstate()
        with dualform.record(model, optimizer, {str(tmp_path)!r}, progress=False) as tape:
            for _ in range(3):
                tape.note(label=1)
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert random.getstate() == before
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- nothing is left

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
STEP_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_load_state_dict_pre_hooks",
)


def traces(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Where something could be left: attributes and hooks of modules, parameters and optimiser; threads."""
    out: dict[str, Any] = {"threads": sum(thread.name.startswith("dualform") for thread in threading.enumerate())}
    for name, module in model.named_modules():
        out[f"{name} attributes"] = sorted(vars(module))
        out |= {f"{name} {hooks}": len(getattr(module, hooks, ())) for hooks in HOOKS}
        out[f"{name} forward"] = module.forward.__func__  # type: ignore[attr-defined]
    for name, parameter in model.named_parameters():
        out[f"{name} attributes"] = sorted(vars(parameter))
        out[f"{name} hooks"] = len(parameter._backward_hooks or ())
        out[f"{name} post hooks"] = len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
    out["optimiser attributes"] = sorted(set(vars(optimizer)) - {"grad_scale", "found_inf"})
    out |= {f"optimiser {hooks}": len(getattr(optimizer, hooks, ())) for hooks in STEP_HOOKS}
    out["optimiser step"] = optimizer.step.__func__  # type: ignore[attr-defined]
    out["groups"] = [sorted(group) for group in optimizer.param_groups]
    return out


@pytest.mark.parametrize("ending", ["normal", "raising", "without a step"])
def test_nothing_is_left_on_model_or_optimiser(ending, tmp_path):
    torch.manual_seed(0)
    model = Whole().double()
    optimizer = with_all(model)
    plain(model, optimizer, *DATA[0])  # torch itself makes some attributes at the first step
    before, methods = traces(model, optimizer), dict(vars(type(model)))
    try:
        with dualform.record(model, optimizer, tmp_path, progress=False) as tape:
            for x, y in DATA if ending != "without a step" else []:
                tape.note(label=y)
                plain(model, optimizer, x, y)
                if ending == "raising":
                    raise RuntimeError("out of memory")
    except RuntimeError:
        assert ending == "raising"
    assert traces(model, optimizer) == before
    assert dict(vars(type(model))) == methods


def test_hooks_of_the_user_stay_and_see_what_they_always_saw(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = with_all(model)
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append("forward") or out * 2)
    model.get_parameter("0.weight").register_hook(lambda grad: seen.append("grad"))
    model[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    run = trained(tmp_path, model, optimizer, DATA)
    assert seen == ["forward", "backward", "grad", "step"] * len(DATA)
    assert run.memory.check(model, full=True).worst < 1e-12
    plain(model, optimizer, *DATA[0])
    assert len(seen) == 4 * len(DATA) + 4


def test_a_graph_that_outlives_the_recording_is_not_recorded(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = with_all(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
        plain(model, optimizer, *DATA[0])
        x, y = DATA[1]
        late = F.cross_entropy(model(x), y)
    late.backward()
    optimizer.step()
    memory = dualform.open(tmp_path)
    assert memory.step == 1 and memory.store.slots("0") == len(y)


def test_a_model_may_be_recorded_again_and_by_two_at_once(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = with_all(model)
    with (
        dualform.record(model, optimizer, tmp_path / "all", dtype="float64", progress=False),
        dualform.record(model, optimizer, tmp_path / "some", dtype="float64", progress=False, layers=["2"]),
    ):
        plain(model, optimizer, *DATA[0])
        plain(model, optimizer, *DATA[1])
    run = trained(tmp_path / "again", model, optimizer, DATA)
    assert run.memory.check(model, full=True).worst < 1e-12
    one, other = dualform.open(tmp_path / "all"), dualform.open(tmp_path / "some")
    assert one.step == other.step == 2
    torch.testing.assert_close(one.weights()["2.weight"], other.weights()["2.weight"])
    torch.testing.assert_close(one.weights()["2.weight"], run.states[0]["2.weight"])


def test_asking_changes_nothing_either(tmp_path):
    torch.manual_seed(0)
    model = Whole().double()
    optimizer = with_all(model)
    run = trained(tmp_path, model, optimizer, DATA)
    model.train()
    model.norm.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    before, left = everything(model, optimizer), traces(model, optimizer)
    memory, x = run.memory, DATA[0][0]
    for view in (memory, memory.at(2), memory.without("label = 0")):
        spot = view.attend(model, x)
        spot.top(2, layer="twice", per="slot")
        spot.by("label", layer="left")
        spot.output("out")
        view.predict(model, x)
        view.check(model)
    memory.ledger("label")
    after = everything(model, optimizer)
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]), name
    assert traces(model, optimizer) == left
    assert {name: module.training for name, module in model.named_modules()} == modes
