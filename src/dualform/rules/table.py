"""The optimisers that are understood, by their exact class."""

from collections.abc import Mapping

import torch

from dualform.errors import UnsupportedOptimizer

from .protocol import Rule
from .sgd import SGD

RULES: dict[type, Rule] = {torch.optim.SGD: SGD}


def rule_for(optimizer: torch.optim.Optimizer, taught: Mapping[type, Rule] | None = None) -> Rule:
    """The rule of this optimiser. A subclass may step differently, so only the very class counts."""
    table = {**RULES, **(taught or {})}
    rule = table.get(type(optimizer))
    if rule is None:
        known = sorted(cls.__name__ for cls in table)
        raise UnsupportedOptimizer(
            f"no rule explains the optimiser {type(optimizer).__name__}; there are rules for {known}. If its step is "
            f"one scalar rule, teach it with rules={{{type(optimizer).__name__}: Rule(...)}} (docs/rules.md). Others, "
            "like Adam, are to come later; until then record keys and errors only, with rules=None."
        )
    return rule
