"""The table of supported optimisers and their rules, by exact class."""

from collections.abc import Iterable, Mapping

from torch import optim

from dualform.errors import UnsupportedOptimizer

from .adafactor import ADAFACTOR
from .adam import ADAM, ADAMAX, ADAMW, NADAM, RADAM
from .muon import MUON
from .protocol import Rule
from .rmsprop import ADADELTA, ADAGRAD, RMSPROP
from .sgd import ASGD, SGD
from .signs import LION, RPROP

RULES: dict[type, Rule] = {
    optim.SGD: SGD,
    optim.ASGD: ASGD,
    optim.Adam: ADAM,
    optim.AdamW: ADAMW,
    optim.NAdam: NADAM,
    optim.RAdam: RADAM,
    optim.Adamax: ADAMAX,
    optim.RMSprop: RMSPROP,
    optim.Adagrad: ADAGRAD,
    optim.Adadelta: ADADELTA,
    optim.Rprop: RPROP,
}
RULES |= {getattr(optim, rule.name): rule for rule in (ADAFACTOR, MUON) if hasattr(optim, rule.name)}  # torch 2.5, 2.9

OTHERS: dict[str, Rule] = {"lion_pytorch.lion_pytorch.Lion": LION}
"""The rules of optimisers of other packages, by the path of the class."""

REFUSED = {
    "LBFGS": "it evaluates the loss several times in a step, and its steps are not linear in the gradients",
    "SparseAdam": "it only updates the rows that a batch used; use Adam with a dense embedding",
}


def rule_for(optimizer: optim.Optimizer, taught: Mapping[type, Rule] | None = None) -> Rule:
    """The rule of an optimiser, by its exact class, since a subclass may step differently."""
    kind = type(optimizer)
    table = {**RULES, **(taught or {})}
    rule = table.get(kind) or OTHERS.get(path_of(kind))
    if rule is None:
        names = sorted({rule_known.name for rule_known in (*table.values(), *OTHERS.values())})
        raise UnsupportedOptimizer(
            f"no rule explains the optimiser {path_of(kind)}{_reason(optimizer, table)}; there are rules for {names}. "
            f"Teach it with rules={{{kind.__name__}: Rule(...)}}, or record keys and errors only, with "
            "rules=None."
        )
    return rule


def path_of(kind: type) -> str:
    """The path of a class, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _reason(optimizer: optim.Optimizer, table: Mapping[type, Rule]) -> str:
    """The reason why an optimiser has no rule, in brackets, if one is known."""
    kind = type(optimizer)
    namesakes = [path for path in (*map(path_of, table), *OTHERS) if path.rpartition(".")[2] == kind.__name__]
    if kind.__name__ in REFUSED:
        return f" ({REFUSED[kind.__name__]})"
    if namesakes:
        return f" (the rule of that name is for {' and '.join(namesakes)}, which may step differently)"
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, optim.Optimizer):
        return (
            f" (it wraps a {path_of(type(inner))}: if each of its steps is one step of that and nothing else, record "
            "that one, optimizer.optimizer)"
        )
    return ""


def named_rules(taught: Iterable[Rule] = ()) -> dict[str, Rule]:
    """All rules by name; a memory stores these names."""
    return {rule.name: rule for rule in (*RULES.values(), *OTHERS.values(), *taught)}
