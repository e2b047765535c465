"""The rule of SGD against torch's own steps."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers import seeds, sgd_settings
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from dualform.rules import SGD
from dualform.types import Transition

IMPLEMENTATIONS = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}]


def transition_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> Transition:
    return SGD.transition(SGD.settings(group, state))


def applied(transition: Transition, weight: torch.Tensor, buffer: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """(W, M) after the step that the transition describes."""
    t = transition
    return torch.stack(
        [t.ww * weight + t.wm * buffer + t.wg * grad, t.mw * weight + t.mm * buffer + t.mg * grad]
    ).detach()


def buffer_of(optimizer: optim.Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    found = optimizer.state.get(parameter, {}).get("momentum_buffer")
    return torch.zeros_like(parameter) if found is None else found.clone()


@given(
    first=sgd_settings(),
    later=st.lists(sgd_settings() | st.none(), max_size=5),
    implementation=st.sampled_from(IMPLEMENTATIONS),
    tensor_lr=st.booleans(),
    seed=seeds,
)
def test_the_rule_says_what_every_step_does_to_weight_and_buffer(first, later, implementation, tensor_lr, seed):
    """The settings change from step to step; None is a step without a gradient."""
    torch.manual_seed(seed)
    parameter = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    tensor_lr = tensor_lr and implementation.get("foreach") is not True  # torch does not take that pair

    def typed(settings):
        return {**settings, "lr": torch.tensor(settings["lr"], dtype=torch.float64)} if tensor_lr else settings

    optimizer = optim.SGD([parameter], **typed(first), **implementation)
    group = optimizer.param_groups[0]
    for settings in [first, *later]:
        if settings is None:
            parameter.grad = None
            before = parameter.detach().clone()
            optimizer.step()
            assert torch.equal(parameter, before)
            continue
        group.update(typed(settings))
        parameter.grad = torch.randn_like(parameter)
        transition = transition_of(group, optimizer.state.get(parameter, {}))
        expected = applied(transition, parameter, buffer_of(optimizer, parameter), parameter.grad)
        optimizer.step()
        torch.testing.assert_close(torch.stack([parameter, buffer_of(optimizer, parameter)]), expected)


@given(momenta=st.lists(st.sampled_from([0.0, 0.5, 0.9]), min_size=2, max_size=6), nesterov=st.booleans())
def test_the_buffer_waits_unchanged_while_momentum_is_zero(momenta, nesterov):
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.1)
    for momentum in momenta:
        optimizer.param_groups[0]["momentum"] = momentum
        parameter.grad = parameter.detach() ** 2
        before = buffer_of(optimizer, parameter)
        transition = transition_of(optimizer.param_groups[0], optimizer.state.get(parameter, {}))
        expected = applied(transition, parameter, before, parameter.grad)
        optimizer.step()
        torch.testing.assert_close(torch.stack([parameter, buffer_of(optimizer, parameter)]), expected)
        if momentum == 0:
            assert (transition.mw, transition.mm, transition.mg) == (0, 1, 0)
            assert torch.equal(buffer_of(optimizer, parameter), before)


def test_the_first_step_knows_no_dampening():
    group = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5, momentum=0.9, dampening=0.25).param_groups[0]
    assert transition_of(group, {}) == Transition(ww=1, wm=0, mw=0, mm=0, wg=-0.5, mg=1)
    later = transition_of(group, {"momentum_buffer": torch.ones(1)})
    assert later == Transition(ww=1, wm=-0.45, mw=0, mm=0.9, wg=-0.375, mg=0.75)


@pytest.mark.parametrize("buffer", [None, torch.ones(1)])
def test_without_momentum_a_step_is_the_gradient_and_the_decay(buffer):
    group = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5, weight_decay=0.25).param_groups[0]
    assert transition_of(group, {"momentum_buffer": buffer}) == Transition(ww=0.875, wg=-0.5)
