"""What is drawn, trained and solved. One run is many trials, which are one tensor program; one seed gives them all."""

from dataclasses import dataclass, replace
from typing import Literal

RATE, DECAY = 0.1, 2.220446049250313e-16
"""Every step has this length; and the decay that the released code trains keys and queries with."""

Gradient = Literal["stable", "released"]
"""Of the library, which does not cancel; or as the released code forms it, with its ε."""


@dataclass(frozen=True)
class PathSettings:
    """E1 and E2: two inputs in the plane. One trial is drawn, all are counted. Only K and Q have a decay."""

    data: Literal["apart", "mixed"]
    T: int
    decay: float = DECAY
    steps: int = 2000
    trials: int = 100
    seed: int = 0


@dataclass(frozen=True)
class LocalSettings:
    """E3: where W, or K and Q, go from random weights, and how near to both separating matrices."""

    attention: Literal["cross", "self"] = "cross"
    decay: float = 0.0
    gradient: Gradient = "stable"
    n: int = 6
    T: int = 8
    d: int = 10
    steps: int = 2000
    shown: tuple[int, ...] = (1000, 2000)
    trials: int = 100
    seed: int = 0


@dataclass(frozen=True)
class OutcomeSettings:
    """E4: whether the tokens that training selects are the best ones, over widths."""

    n: int
    start: Literal["uniform", "zero"] = "uniform"
    T: int = 5
    widths: tuple[int, ...] = (2, 3, 4, 5, 6, 8, 10, 15, 20, 30)
    steps: int = 1500
    trials: int = 200
    fewer: int = 100
    """Trials from width 20 on."""
    seed: int = 0


@dataclass(frozen=True)
class RankSettings:
    """E5: ranks of both separating matrices at the best tokens; no training. The published way takes long: fewer."""

    n: int
    T: int
    widths: tuple[int, ...] = (1, 2, 3, 4, 5, 10, 15, 20)
    trials: int = 100
    published: int = 10
    seed: int = 0


@dataclass(frozen=True)
class NonlinearSettings:
    """E6: a ReLU head, which may like mixtures of tokens. Batches are trained until enough trials are accepted."""

    d: int
    accepted: int
    gradient: Gradient = "released"
    n: int = 3
    T: int = 4
    steps: int = 2001
    batch: int = 1000
    most: int = 60
    """Batches after which it ends anyway."""
    seed: int = 0


@dataclass(frozen=True)
class QuadraticSettings:
    """E7: a quadratic head on orthonormal tokens, over its λ. ``steps`` at each rate, so that mixtures come to rest."""

    weights: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
    n: int = 3
    T: int = 5
    d: int = 8
    steps: int = 2000
    rates: tuple[float, ...] = (0.1, 0.03, 0.01, 0.003, 0.001)
    trials: int = 100
    seed: int = 0


@dataclass(frozen=True)
class TrainedSettings:
    """A small transformer on real data, recorded, and the moments at which its heads are looked at.

    ``asked`` test sequences and ``queries`` of them; ``above`` this weight a query is sharp.
    """

    task: Literal["fables", "vowels"]
    steps: int
    moments: tuple[int, ...]
    batch: int = 8
    rate: float = 2e-3
    decay: float = 0.01
    width: int = 64
    heads: int = 4
    layers: int = 2
    hidden: int = 128
    length: int = 64
    asked: int = 16
    queries: int = 256
    null: int = 5
    above: float = 0.9
    mixtures: bool = True
    most: int | None = None
    seed: int = 0


AnySettings = (
    PathSettings
    | LocalSettings
    | OutcomeSettings
    | RankSettings
    | NonlinearSettings
    | QuadraticSettings
    | TrainedSettings
)

EXPERIMENTS: dict[str, dict[str, AnySettings]] = {
    "paths": {"separation": PathSettings("apart", 5), "two-norms": PathSettings("mixed", 3)},
    "local": {
        "cross": LocalSettings(),
        "cross-decay": LocalSettings(decay=DECAY),
        "self": LocalSettings("self"),
        "self-decay": LocalSettings("self", DECAY),
        "released": LocalSettings(gradient="released"),
        "long": LocalSettings(steps=20_000, shown=(1000, 2000, 5000, 20_000)),
    },
    "outcomes": {
        **{f"n-{n}": OutcomeSettings(n) for n in (2, 4, 6, 10)},
        **{f"n-{n}-zero": OutcomeSettings(n, "zero") for n in (2, 4, 6, 10)},
    },
    "ranks": {f"n-{n}-T-{T}": RankSettings(n, T) for n, T in ((5, 5), (10, 5), (15, 5), (5, 10), (5, 15))},
    "nonlinear": {
        **{f"d-{d}": NonlinearSettings(d, 500) for d in (4, 6, 8, 10)},
        **{f"d-{d}-stable": NonlinearSettings(d, 500, "stable") for d in (4, 6, 8, 10)},
    },
    "quadratic": {"orthonormal": QuadraticSettings()},
    "trained": {
        "fables": TrainedSettings("fables", 3000, (0, 30, 100, 300, 1000, 2000, 3000)),
        "vowels": TrainedSettings("vowels", 510, (0, 10, 30, 80, 200, 350, 510), batch=16, rate=1e-3, asked=32),
    },
}
"""By experiment and variant."""

ON_REQUEST: dict[str, dict[str, AnySettings]] = {}


def tiny(settings: AnySettings) -> AnySettings:
    """The same for a few steps and trials, to see that all of it runs."""
    match settings:
        case PathSettings():
            return replace(settings, steps=40, trials=4)
        case LocalSettings():
            return replace(settings, steps=40, shown=(20, 40), trials=3)
        case OutcomeSettings():
            return replace(settings, widths=(2, 6), steps=60, trials=4, fewer=4)
        case RankSettings():
            return replace(settings, n=3, T=3, widths=(1, 4), trials=3, published=2)
        case NonlinearSettings():
            return replace(settings, d=4, accepted=3, steps=300, batch=40, most=3)
        case QuadraticSettings():
            return replace(settings, weights=(0.0, 0.2, 2.0), steps=100, rates=(0.1, 0.01), trials=3)
        case TrainedSettings():
            return replace(
                settings, steps=4, moments=(0, 4), batch=4, width=8, heads=2, layers=1, hidden=8, length=8, asked=4,
                queries=12, null=1, most=8,
            )  # fmt: skip
