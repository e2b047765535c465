"""Numbers and answers as words. Every number says its unit, and parts say what they sum to."""

import math
from collections.abc import Iterable, Sequence

from dualform.explain import Groups
from dualform.types import Score

MASKED = (
    "A mask removes direct contributions with everything else held fixed. It shows what the weights are made of, not what "
    "training without these examples would have given."
)
FIRST_ORDER = (
    "This is not the last layer: a contribution is followed through the layers after it to first order. The parts still sum "
    "to the layer's own change."
)


def unit(score: Score, target: str) -> str:
    """What a score counts."""
    return {
        "contribution": f"what it adds to {target}",
        "weight": "the weight α = key · query, a similarity without a unit",
        "abs": "the size |α| of the weight, without a unit",
    }[score]


def same_digits(values: Iterable[float], least: int = 2) -> list[str]:
    """Signed numbers with the same number of decimals, enough for three digits of the largest; so a column visibly adds up."""
    values = list(values)
    largest = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
    places = least if largest == 0 else min(9, max(least, 2 - math.floor(math.log10(largest))))
    return [f"{value:+.{places}f}" for value in values]


def parts(groups: Groups, query: int = 0) -> dict[str, float]:
    """The parts of a contribution that sum to the whole, by their names."""
    assert groups.bias is not None and groups.initial is not None
    return {
        "training, through the weights": float(groups.values[query].sum()),
        "training, through the bias": float(groups.bias[query].sum()),
        "what is left of the first weights": float(groups.initial[query]),
    }


def sum_check(groups: Groups, query: int = 0) -> str:
    """The parts, what they sum to, and what is left over."""
    assert groups.total is not None and groups.residual is not None
    total = float(groups.total[query])
    *numbers, whole = same_digits([*parts(groups, query).values(), total])
    named = " ".join(f"{number} ({name})" for number, name in zip(numbers, parts(groups, query), strict=True))
    return (
        f"Parts sum to the whole: {named} = {whole}, the part of layer {groups.layer} in {groups.target}; "
        f"the residual is {float(groups.residual[query]):+.0e}."
    )


def ends(values: Sequence[float], shown: int) -> list[int]:
    """The places of the largest and the smallest values, largest first: all of them where there are few."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    return order if len(order) <= 2 * shown else order[:shown] + order[-shown:]


def size(count: float) -> str:
    """A number of bytes for people."""
    for name in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            break
        count, name = count / 1000, "TB"
    return f"{count:,.0f} {name}" if name == "bytes" or count >= 100 else f"{count:.1f} {name}"
