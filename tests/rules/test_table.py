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


def test_an_optimiser_of_the_same_name_is_told_from_ours_by_its_module():
    transformers = pytest.importorskip("transformers")
    with pytest.raises(UnsupportedOptimizer) as error:
        rule_for(transformers.Adafactor(parameters()))
    assert "transformers.optimization.Adafactor" in str(error.value)
    if hasattr(optim, "Adafactor"):  # from torch 2.5 on
        assert f"{optim.Adafactor.__module__}.Adafactor" in str(error.value)
    other = type("Lion", (optim.Optimizer,), {"__module__": "pytorch_optimizer.optimizer.lion"})
    with pytest.raises(UnsupportedOptimizer, match=r"pytorch_optimizer\..*Lion.*lion_pytorch\.lion_pytorch\.Lion"):
        rule_for(other(parameters(), {}))


class Lookahead(optim.Optimizer):
    """Steps differently from the optimiser that it holds."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def test_an_unknown_wrapper_is_refused_and_what_it_holds_is_named():
    with pytest.raises(UnsupportedOptimizer, match=r"Lookahead \(it wraps a torch\.optim\.sgd\.SGD"):
        rule_for(Lookahead(optim.SGD(parameters())))
