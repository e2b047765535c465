"""One optimiser family a file: what a step does to a parameter, and so what each slot counts for at any horizon."""

from dualform.types import Transition

from .protocol import Rule
from .sgd import SGD
from .sweep import Coefficients, sweep
from .table import RULES, rule_for

__all__ = ["RULES", "SGD", "Coefficients", "Rule", "Transition", "rule_for", "sweep"]
