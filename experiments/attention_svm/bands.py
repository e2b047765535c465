"""The bands that results must lie in, each with its measured value. The page lists them and a test checks them."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from .references import RANKS
from .results import found
from .settings import EXPERIMENTS


class Band(NamedTuple):
    """A value and the range it should lie in; ``check`` is the number of the acceptance check."""

    check: int
    what: str
    value: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def met(self) -> bool:
        """Whether the value lies in its range."""
        return self.low <= self.value <= self.high

    @property
    def range(self) -> str:
        """The range in words."""
        if math.isinf(self.high):
            return f"at least {self.low:g}"
        return f"at most {self.high:g}" if math.isinf(self.low) else f"{self.low:g} to {self.high:g}"


def bands() -> list[Band]:
    """All bands for which results are kept."""
    return [*local(), *stable(), *outcomes(), *ranks(), *nonlinear()]


def local() -> Iterator[Band]:
    """Check 13: matched pairs, mismatched pairs and softmax saturation, for every variant of 2,000 steps."""
    for variant in ("released", "cross-decay", "cross", "self-decay", "self"):
        if (result := found("local", variant)) is None:
            continue
        for name, own in (("W", "frobenius"), ("KQ", "nuclear")):
            last: dict[str, Any] = list(result[name]["shown"].values())[-1]
            for norm in ("frobenius", "nuclear"):
                low, high = (0.985, 1.0) if norm == own else (0.80, 0.91)
                yield Band(13, f"{variant}: {name} with {norm}", last[norm]["mean"], low, high)
            yield Band(13, f"{variant}: {name}, largest softmax", last["softmax"]["mean"], 0.999, 1.0)


def stable() -> Iterator[Band]:
    """Check 14: the stable gradient at 5,000 steps."""
    if (result := found("local", "long")) and (seen := result["W"]["shown"].get("5000")):
        yield Band(14, "W with frobenius at 5,000 steps", seen["frobenius"]["mean"], 0.9995, 1.0)
        yield Band(14, "margin efficiency at 5,000 steps", seen["efficiency_frobenius"]["mean"], 0.97, 1.0)


def outcomes() -> Iterator[Band]:
    """Check 15: the share of global outcomes over widths at n = 6, and over n at width 5."""
    results = {n: result for n in (2, 4, 6, 10) if (result := found("outcomes", f"n-{n}"))}
    share = {(n, row["d"]): row["global"] for n, result in results.items() for row in result["widths"]}
    for d, low, high in ((3, 0.0, 0.40), (6, 0.60, 0.80), (15, 0.88, 1.0)):
        if (6, d) in share:
            yield Band(15, f"global share, n = 6, d = {d}", share[6, d], low, high)
    for n, more in ((2, 4), (4, 6), (6, 10)):
        if (n, 5) in share and (more, 5) in share:
            yield Band(15, f"fall of the global share from n = {n} to {more}, d = 5", share[n, 5] - share[more, 5], 0.0)


def ranks() -> Iterator[Band]:
    """Check 11: accurate nuclear ranks are within 0.7 of the independent measurement."""
    for (n, d), (_, _, rank) in RANKS.items():
        for row in (found("ranks", f"n-{n}-T-5") or {"widths": []})["widths"]:
            if row["d"] == d:
                yield Band(11, f"nuclear rank, n = {n}, d = {d}", row["nuclear"]["mean"], rank - 0.7, rank + 0.7)


def nonlinear() -> Iterator[Band]:
    """Check 18: the order of the three predictions at d = 4 and 6, and saturated trials."""
    for variant in EXPERIMENTS["nonlinear"]:
        result = found("nonlinear", variant)
        if result is None or not result["formula"]["trials"]:
            continue
        formula, direction, token = (result[name]["mean"] for name in ("formula", "direction", "token"))
        if result["d"] in (4, 6):
            yield Band(18, f"accepted trials, {variant}", result["formula"]["trials"], 50)
            yield Band(18, f"direction only, less both parts, {variant}", direction - formula, 0.0)
            yield Band(18, f"single token, less direction only, {variant}", token - direction, 0.0)
        if result["saturated"]["trials"]:
            yield Band(18, f"saturated trials, mean, {variant}", result["saturated"]["mean"], 0.0, 0.006)
