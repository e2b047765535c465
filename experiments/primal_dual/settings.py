"""Settings of all trainings. The paper's settings were not available; these are common ones, sized for two cores."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

FAMILY = (
    *("softmax", "bn", "sh", "bn+sh"),
    *(f"{kernel}{more}" for kernel in ("linear", "sparse") for more in ("", "-bn", "-sh", "-bn+sh")),
    *("conv1d", "conv1d+bn", "conv2d", "conv2d+bn"),
)
"""The attentions of this paper and their baselines."""
ON_SEQUENCES = [name for name in FAMILY if not name.startswith("conv2d")]


@dataclass(frozen=True)
class Settings:
    """A small transformer with one attention of the table, on one task."""

    task: str
    attention: str = "softmax"
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the attention layers besides width and heads."""
    width: int = 64
    heads: int = 8
    layers: int = 2
    hidden: int = 128
    dropout: float = 0.1
    optimiser: Literal["RAdam", "AdamW"] = "RAdam"
    learning_rate: float = 1e-3
    decay: float = 0.0
    clip: float | None = None
    batch: int = 16
    updates: int = 0
    epochs: int = 0
    """Duration: ``updates`` or, if that is 0, ``epochs`` passes over the training set."""
    seed: int = 0
    length: int = 0
    """Maximum number of tokens of a text."""
    most: int = 0
    """Number of training examples, 0 for all; the test set is then a third as large."""


@dataclass(frozen=True)
class CostSettings:
    """A grid of lengths and widths. A forward and backward pass of one sequence is timed on one thread."""

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    widths: tuple[int, ...] = (64, 128, 256, 512)
    heads: int = 8
    turns: int = 5
    seed: int = 0


@dataclass(frozen=True)
class UpdateSettings:
    """The tasks on which updates are timed, and how often; one thread."""

    tasks: tuple[str, ...]
    turns: int = 7
    seed: int = 0
    quick: bool = False


AnySettings = Settings | CostSettings | UpdateSettings

SERIES = {
    "japanese-vowels": ("JapaneseVowels", 30),
    "basic-motions": ("BasicMotions", 100),
    "natops": ("NATOPS", 60),
    "articulary-words": ("ArticularyWordRecognition", 40),
    "handwriting": ("Handwriting", 80),
    "uwave": ("UWaveGestureLibrary", 50),
}
"""Data sets of the UEA archive, and the number of epochs on each."""

DIGITS = Settings("small-digits", width=32, heads=4, hidden=64, learning_rate=3e-3, batch=32, epochs=20)
NEEDLE = Settings(
    "needle", width=32, heads=4, hidden=64, dropout=0.0, optimiser="AdamW", learning_rate=2e-3, decay=1e-2, clip=1.0,
    batch=32, updates=400,
)  # fmt: skip
"""Spec C7."""
LISTOPS = Settings(
    "listops", heads=2, optimiser="AdamW", decay=1e-2, clip=1.0, batch=32, updates=800, length=128, most=20_000
)
TEXT = replace(LISTOPS, task="reviews", batch=16, updates=800, length=256, most=20_000)


def over(base: Settings, names: list[str], **scaled: Any) -> dict[str, AnySettings]:
    """The base settings with each attention; ``scaled`` are the options of attentions with scaled heads."""
    return {name: replace(base, attention=name, options=dict(scaled) if name.endswith("sh") else {}) for name in names}


def ablations(base: Settings) -> dict[str, AnySettings]:
    """Spec C11: variants of β, use of the variance, pooling and scales."""
    scales = ((1, 1, 2, 2), (1, 2, 2, 4), (1, 1, 4, 4), (1, 2, 4, 8), (2, 2, 4, 4))
    return {
        **{f"beta-{beta:g}": replace(base, attention="bn", options={"beta": beta}) for beta in (0.0, 0.25, 0.5, 1.0)},
        **{
            f"centred-{beta:g}": replace(base, attention="bn", options={"beta": beta, "use_var": False})
            for beta in (0.0, 0.25, 0.5, 1.0)
        },
        **{
            f"{pool}-{'-'.join(map(str, each))}": replace(base, attention="sh", options={"pool": pool, "scales": each})
            for pool in ("avg", "stride")
            for each in scales
        },
    }


EXPERIMENTS: dict[str, dict[str, AnySettings]] = {
    **{name: over(Settings(name, epochs=epochs), ON_SEQUENCES) for name, (_, epochs) in SERIES.items()},
    "small-digits": over(DIGITS, list(FAMILY)),
    "listops": over(LISTOPS, ON_SEQUENCES),
    "reviews": over(TEXT, ON_SEQUENCES),
    "needle": over(NEEDLE, ON_SEQUENCES, scales=(1, 1, 2, 4)),
    "ablations-needle": ablations(NEEDLE),
    "ablations-natops": ablations(Settings("natops", heads=4, epochs=60)),
    "recorded": over(replace(DIGITS, epochs=0, updates=600), list(FAMILY)),
    "efficiency": {"grid": CostSettings()},
    "updates": {"all": UpdateSettings((*SERIES, "small-digits", "listops", "reviews"))},
}
"""Settings by experiment and variant."""

ON_REQUEST: dict[str, dict[str, Settings]] = {}
NETWORKS, ONCE = 3, ("recorded", "efficiency", "updates")
"""The number of networks per variant, and the experiments that run only once."""


def tiny(settings: AnySettings) -> AnySettings:
    """Settings for a few steps only, to test that everything runs."""
    if isinstance(settings, UpdateSettings):
        return replace(settings, tasks=("natops", "listops"), turns=1, quick=True)
    if isinstance(settings, CostSettings):
        return CostSettings(lengths=(32, 64), widths=(16, 32), turns=1)
    return replace(
        settings, updates=3, width=16, hidden=16, batch=4, length=settings.length and 40, most=24,
    )  # fmt: skip
