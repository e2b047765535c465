"""The update rules of optimisers, one family per file, which give the coefficient of each slot at any horizon."""

from dualform.types import Transition

from .protocol import Rule, Seen, Settings, Shared, numbers
from .sgd import SGD
from .sweep import Coefficients, sweep
from .table import OTHERS, RULES, named_rules, path_of, rule_for

__all__ = [
    "OTHERS",
    "RULES",
    "SGD",
    "Coefficients",
    "Rule",
    "Seen",
    "Settings",
    "Shared",
    "Transition",
    "named_rules",
    "numbers",
    "path_of",
    "rule_for",
    "sweep",
]
