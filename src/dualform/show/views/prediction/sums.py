"""All of training in a few numbers: the parts of the explained number by the groups of a column."""

from dataclasses import dataclass
from typing import Any

from dualform.explain import Groups

from ...text import ends, parts
from ..explorer import Explorer

ENDS = 12
"""How many groups are shown at either end of a long list."""


@dataclass(frozen=True)
class SumPart:
    """One term of a sum; ``kind`` is group, others, bias, initial or total."""

    name: str
    kind: str
    value: float
    group: str = ""
    """The group as the address of the page What if names it."""


@dataclass(frozen=True)
class SumOfParts:
    """The terms of the explained number, what they sum to, and what is left by rounding."""

    terms: list[SumPart]
    training: float
    """What all of training adds."""
    total: float | None
    residual: float | None
    sentence: str
    """What the terms sum to."""


def sum_of_parts(explorer: Explorer, groups: Groups, name: str) -> SumOfParts:
    """The terms, largest first if there are many groups."""
    values = (groups.values[0] + (groups.bias[0] if groups.bias is not None else 0.0)).tolist()
    shown = list(range(len(values))) if len(values) <= 2 * ENDS else ends(values, ENDS)
    terms = [
        SumPart(name_of(explorer, groups.column, groups.names[i]), "group", values[i], str(groups.names[i]))
        for i in shown
    ]
    if len(shown) < len(values):
        rest = sum(values) - sum(values[i] for i in shown)
        terms.insert(ENDS, SumPart(f"{len(values) - len(shown):,} others", "others", rest))
    if groups.total is None or groups.residual is None:
        return SumOfParts(terms, sum(values), None, None, "")
    named = parts(groups)
    initial = {key: value for key, value in named.items() if key.startswith("initial")}
    terms += [SumPart(key, "initial", value) for key, value in initial.items()]
    total = float(groups.total[0])
    terms.append(SumPart("sum of all", "total", total))
    return SumOfParts(terms, sum(values), total, float(groups.residual[0]), _sentence(groups, name))


def _sentence(groups: Groups, name: str) -> str:
    if groups.layer:
        return (
            f"The parts sum to everything that layer {groups.layer} adds to {name}. Each layer accounts for the same "
            "number in its own way, so do not add layers up."
        )
    return f"The parts sum to the first-order effect of all layers together on {name}, which need not be its value."


def name_of(explorer: Explorer, column: str | None, value: Any) -> str:
    """The name of a group on the page."""
    if value is None:
        return f"{column} unknown"
    if column == "label" and isinstance(value, int) and explorer.classes is not None:
        return explorer.class_name(value)
    return f"{column} {value}"
