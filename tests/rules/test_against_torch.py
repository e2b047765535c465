"""Every rule against the optimiser's own steps: what it says of a step is what happens to weight, buffer and state."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from dualform.engine import ParameterState, advance
from dualform.rules import RULES, Rule, rule_for
from dualform.rules.signs import LION


class Lion(optim.Optimizer):
    """Lion as it is published: Chen et al. (2023), algorithm 2."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple = (0.9, 0.99), weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                inner, outer = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_((inner * mean + (1 - inner) * p.grad).sign(), alpha=group["lr"])
                mean.mul_(outer).add_(p.grad, alpha=1 - outer)


CASES: list[tuple[type, dict[str, Any]]] = [
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.ASGD, {"weight_decay": 0.1, "alpha": 0.5}),
    (optim.Adam, {}),
    (optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (optim.Adam, {"maximize": True, "betas": (0.5, 0.7)}),
    (optim.AdamW, {"weight_decay": 0.3}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.NAdam, {"weight_decay": 0.1}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.1}),
    (optim.RAdam, {"weight_decay": 0.1}),
    (optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.9, 0.9)}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.8, "weight_decay": 0.1}),
    (optim.RMSprop, {"momentum": 0.5, "alpha": 0.5}),
    (optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}),
    (optim.Adadelta, {"weight_decay": 0.1, "rho": 0.5}),
    (optim.Rprop, {}),
    (Lion, {}),
]
if hasattr(optim, "Adafactor"):  # from torch 2.5 on
    CASES += [(optim.Adafactor, {"weight_decay": 0.1}), (optim.Adafactor, {"d": 1.0, "eps": (1e-3, 1e-2)})]
MUON = getattr(optim, "Muon", None)
"""From torch 2.9 on."""
SHAPES = [(5, 4), (6,), (3, 2, 2, 2)]
IMPLEMENTATIONS = [{"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True}]


def rule_of(optimizer: optim.Optimizer) -> Rule:
    return LION if isinstance(optimizer, Lion) else rule_for(optimizer)


def followed(optimizer: optim.Optimizer, parameter: nn.Parameter, steps: int, seed: int, dead: bool = False) -> float:
    """Train a parameter on random gradients, and follow it by its rule alone: how far they are apart in the end."""
    rule, random = rule_of(optimizer), torch.Generator().manual_seed(seed)
    known = optimizer.state.get(parameter, {})
    state = ParameterState(
        parameter.detach().clone(),
        torch.zeros_like(parameter.detach()),
        {key: known[key].clone() for key in rule.shared if key in known},
    )
    first, eps = state.weight, torch.finfo(parameter.dtype).eps
    for step in range(steps):
        if step == 2:
            parameter.grad = None
            optimizer.step()
            continue
        parameter.grad = torch.randn(parameter.shape, generator=random, dtype=parameter.dtype)
        if dead:
            parameter.grad.reshape(-1)[0] = 0.0
        settings = rule.settings(optimizer.param_groups[0], optimizer.state.get(parameter, {}))
        state = advance(rule, rule.transition(settings), settings, state, parameter.grad, eps)
        optimizer.step()
    now = parameter.detach()
    return float((state.weight - now).norm() / (now - first).norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("optimizer", "settings"), CASES, ids=str)
def test_a_rule_says_what_its_optimiser_does(optimizer, settings, shape):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    assert followed(optimizer([parameter], lr=1e-2, **settings), parameter, 12, seed=1, dead=True) < 1e-12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize(("optimizer", "settings"), [case for case in CASES if case[0] is not Lion], ids=str)
def test_a_rule_holds_for_every_implementation(optimizer, settings, implementation):
    """Where torch has that implementation for this optimiser, on a processor."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4))
    try:
        made = optimizer(
            [parameter], lr=torch.tensor(1e-2) if "capturable" in implementation else 1e-2, **settings, **implementation
        )
        with torch.no_grad():
            parameter.grad = torch.zeros_like(parameter)
        optimizer([nn.Parameter(torch.ones(2, 2))], lr=1e-2, **settings, **implementation)
        probe = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
        probe.grad = torch.ones_like(probe)
        optimizer([probe], lr=1e-2, **settings, **implementation).step()
    except (TypeError, RuntimeError, AssertionError, ValueError) as error:
        pytest.skip(f"torch has no such implementation: {error}")
    assert followed(made, parameter, 6, seed=2) < 1e-7


@given(
    case=st.sampled_from(CASES), lr=st.floats(1e-4, 0.1), seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 8)
)  # fmt: skip
def test_a_rule_holds_for_any_learning_rate_and_gradients(case, lr, seed, steps):
    torch.manual_seed(seed)
    parameter = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    assert followed(case[0]([parameter], lr=lr, **case[1]), parameter, steps, seed) < 1e-11


@pytest.mark.parametrize(
    "settings", [{}, {"nesterov": False, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}], ids=str
)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
def test_muon_steps_as_its_rule_says_up_to_its_own_rounding(settings, shape):
    """It computes its step in bfloat16."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    if MUON is None:
        pytest.skip("this torch has no Muon")
    assert followed(MUON([parameter], lr=1e-2, **settings), parameter, 10, seed=1) < 0.06


def test_every_rule_of_the_table_is_tried():
    assert {*RULES} == {optimizer for optimizer, _ in CASES if optimizer is not Lion} | ({MUON} if MUON else set())


@pytest.mark.parametrize(("optimizer", "settings"), CASES, ids=str)
def test_a_rule_changes_no_tensor_that_it_is_given(optimizer, settings):
    parameter = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    made = optimizer([parameter], lr=1e-2, **settings)
    parameter.grad = torch.randn_like(parameter)
    made.step()
    rule, known = rule_of(made), made.state[parameter]
    shared = {key: known[key] for key in rule.shared if key in known}
    buffer = known.get(rule.buffer) if rule.buffer else None
    state = ParameterState(parameter.detach(), torch.zeros(3, 4).double() if buffer is None else buffer, shared)
    before = [t.clone() for t in (state.weight, state.buffer, *shared.values(), parameter.grad)]
    numbers = rule.settings(made.param_groups[0], known)
    advance(rule, rule.transition(numbers), numbers, state, parameter.grad, 1e-16)
    for old, new in zip(before, (state.weight, state.buffer, *shared.values(), parameter.grad), strict=True):
        assert torch.equal(old, new)
