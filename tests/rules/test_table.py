"""Which optimiser has which rule."""

import pytest
import torch
from torch import nn, optim

from dualform.errors import UnsupportedOptimizer
from dualform.rules import RULES, SGD, Rule, rule_for
from dualform.types import Transition


class MySGD(optim.SGD):
    pass


MY_RULE = Rule("MySGD", lambda s: Transition(wg=-s["lr"]))


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


def test_sgd_has_a_rule():
    assert rule_for(optim.SGD(parameters())) is SGD


@pytest.mark.parametrize("optimizer", [optim.LBFGS, optim.SparseAdam, MySGD])
def test_an_optimiser_without_a_rule_is_refused_by_name(optimizer):
    with pytest.raises(UnsupportedOptimizer, match=rf"\b{optimizer.__name__}\b"):
        rule_for(optimizer(parameters()))


def test_a_subclass_is_another_optimiser_until_it_is_taught():
    with pytest.raises(UnsupportedOptimizer, match="MySGD"):
        rule_for(MySGD(parameters()))
    assert rule_for(MySGD(parameters()), {MySGD: MY_RULE}) is MY_RULE


def test_a_taught_rule_comes_before_that_of_the_library_and_does_not_stay():
    before = dict(RULES)
    assert rule_for(optim.SGD(parameters()), {optim.SGD: MY_RULE}) is MY_RULE
    assert before == RULES
