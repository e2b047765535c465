"""Settings of pretraining, conversion and uptraining, sized for one thread instead of the paper's models and data."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Start:
    """A small vision transformer with multi-head attention, trained from scratch; uptraining uses the same recipe."""

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
    """Number of training images, 0 for all; the test set is then a third as large."""


@dataclass(frozen=True)
class Uptraining:
    """The same network, converted to another attention by pooling weights, and trained further with the same recipe."""

    start: Start
    attention: str = "softmax"
    options: dict[str, Any] = field(default_factory=dict)
    points: tuple[int, ...] = (25, 50, 100, 200)
    """Numbers of updates after which it is tested; the last is the end."""
    seed: int = 0


@dataclass(frozen=True)
class Recording:
    """A network with one attention, recorded from its initial weights."""

    attention: str = "softmax"
    options: dict[str, Any] = field(default_factory=dict)
    start: Start = Start("small-digits", width=32, layers=2, patch=2, rate=2e-3, decay=0.0, batch=32, updates=300)
    seed: int = 0


AnySettings = Start | Uptraining | Recording

WINDOW = 25
"""Passes between updates of dynamic groups: about ten updates, as in an epoch of the released code with 300."""

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
"""Attentions and their options, by variant."""


def over(start: Start, names: dict[int, list[str]]) -> dict[str, AnySettings]:
    """Multi-head attention without conversion, and grouped attentions by their number of groups."""
    variants: dict[str, AnySettings] = {"mha": Uptraining(start)}
    for groups, chosen in names.items():
        for name in chosen:
            attention, options = GROUPED[name]
            variants[f"{name}-{groups}"] = Uptraining(start, attention, {"groups": groups, **options})
    return variants | {"mqa": Uptraining(start, "gqa", {"groups": 1})}


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
"""Settings by experiment and variant. The next two experiments start from the checkpoint of their seed."""

ON_REQUEST: dict[str, dict[str, AnySettings]] = {}
NETWORKS, ONCE = 3, ("recorded",)
"""The number of networks per variant, and the experiments that run only once."""


def tiny(settings: AnySettings) -> AnySettings:
    """Settings for a few steps only, to test that everything runs."""
    if isinstance(settings, Start):
        return replace(settings, width=16, layers=2, batch=8, updates=6, most=96)
    start = tiny(settings.start)
    assert isinstance(start, Start)
    if isinstance(settings, Recording):
        return replace(settings, start=start)
    options = {**settings.options, "window": 2} if "window" in settings.options else settings.options
    return replace(settings, start=start, points=(2, 4), options=options)
