"""What is trained, converted and trained on. The paper's models and data are out of reach; these are for one thread."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Start:
    """A small vision transformer with multi-head attention, trained from the beginning; the recipe never changes."""

    task: str
    width: int = 64
    heads: int = 8
    layers: int = 4
    ratio: float = 2.0
    patch: int = 4
    rate: float = 5e-4
    decay: float = 0.05
    clip: float = 1.0
    batch: int = 64
    updates: int = 2000
    seed: int = 0
    most: int = 0
    """Training pictures that are used, where not all are; a third as many for tests."""


@dataclass(frozen=True)
class Uptraining:
    """The same network with another attention, its weights pooled, trained on with the same recipe for a while."""

    start: Start
    attention: str = "softmax"
    options: dict[str, Any] = field(default_factory=dict)
    points: tuple[int, ...] = (25, 50, 100, 200)
    """Updates after which it is tested; the last is the end."""
    seed: int = 0


@dataclass(frozen=True)
class Recording:
    """A network of one attention, recorded from its beginning."""

    attention: str = "softmax"
    options: dict[str, Any] = field(default_factory=dict)
    start: Start = Start("small-digits", width=32, layers=2, patch=2, rate=2e-3, decay=0.0, batch=32, updates=300)
    seed: int = 0


AnySettings = Start | Uptraining | Recording

WINDOW = 25
"""Passes between updates of dynamic groups: some ten updates, as the released code has in an epoch with 300."""

FASHION, CIFAR = Start("fashion-mnist"), Start("cifar10")

GROUPED: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("gqa", {}),
    "kdgqa": ("kdgqa", {}),
    "kdgqa-least": ("kdgqa", {"least": 1}),
    "kdgqa-reference": ("kdgqa", {"mode": "reference"}),
    "dgqa-diff": ("dgqa", {"kind": "diff", "window": WINDOW}),
    "dgqa-ema": ("dgqa", {"kind": "ema", "window": WINDOW}),
    "dgqa-reference": ("dgqa", {"kind": "ema", "window": WINDOW, "mode": "reference"}),
    "pgqa": ("pgqa", {}),
    "pgqa-reference": ("pgqa", {"mode": "reference"}),
    "pgqa-mean": ("pgqa", {"centred": False}),
}
"""Attentions and their options, by the names of their variants."""


def over(start: Start, names: dict[int, list[str]]) -> dict[str, AnySettings]:
    """Multi-head attention, which only goes on, and by the number of groups those with groups."""
    found: dict[str, AnySettings] = {"mha": Uptraining(start)}
    for groups, chosen in names.items():
        for name in chosen:
            attention, options = GROUPED[name]
            found[f"{name}-{groups}"] = Uptraining(start, attention, {"groups": groups, **options})
    return found | {"mqa": Uptraining(start, "gqa", {"groups": 1})}


SOME = ["gqa", "kdgqa", "kdgqa-least", "dgqa-ema", "dgqa-reference", "pgqa"]
MOST = [name for name in GROUPED if name != "pgqa-mean"]

EXPERIMENTS: dict[str, dict[str, AnySettings]] = {
    "checkpoints": {"fashion-mnist": FASHION, "cifar10": CIFAR},
    "fashion-mnist": over(FASHION, {4: list(GROUPED), 2: MOST}),
    "cifar10": over(CIFAR, {4: SOME, 2: SOME}),
    "recorded": {
        "mha": Recording(),
        **{name: Recording(name, {"groups": 4, **more}) for name, more in
           (("gqa", {}), ("kdgqa", {}), ("dgqa", {"window": WINDOW}), ("pgqa", {}))},
    },
}  # fmt: skip
"""By experiment and variant. Checkpoints are what the next two begin with, seed by seed."""

ON_REQUEST: dict[str, dict[str, AnySettings]] = {}
NETWORKS, ONCE = 3, ("recorded",)
"""How many networks of each variant are trained, and experiments that are made once."""


def tiny(settings: AnySettings) -> AnySettings:
    """The same for a few steps, to see that all of it runs."""
    if isinstance(settings, Start):
        return replace(settings, width=16, layers=2, batch=8, updates=6, most=96)
    start = tiny(settings.start)
    assert isinstance(start, Start)
    if isinstance(settings, Recording):
        return replace(settings, start=start)
    options = {**settings.options, "window": 2} if "window" in settings.options else settings.options
    return replace(settings, start=start, points=(2, 4), options=options)
