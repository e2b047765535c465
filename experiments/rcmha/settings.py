"""Settings of all experiments. We do not know the paper's own; these are sized for one CPU thread."""

from dataclasses import dataclass, field, replace
from typing import Any

from .texts import TextName

FOUR = ("softmax", "mdha", "relative", "relative-conv")
"""The attentions that the paper compares: MHA, MDHA, RMHA, RCMHA."""


@dataclass(frozen=True)
class Settings:
    """A language model with one of the attentions, on one text."""

    text: TextName
    attention: str = "softmax"
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the attention layers, beyond width and heads."""
    width: int = 64
    heads: int = 4
    layers: int = 3
    hidden: int = 128
    segment: int = 64
    memory: int = 64
    batch: int = 16
    updates: int = 1500
    peak: float = 1e-2
    """The learning rate at the end of the warm-up; the schedule is Noam's."""
    warmup: int = 300
    clip: float = 1.0
    validated: int = 200_000
    """Number of validation tokens that networks are evaluated on."""
    valid_from: int = 0
    """Position of the first validation token."""
    seed: int = 0


@dataclass(frozen=True)
class CountSettings:
    """A count baseline on the validation text; nothing is trained."""

    text: TextName
    validated: int = Settings.validated
    seed: int = 0


@dataclass(frozen=True)
class CostSettings:
    """Experiments whose updates are timed on one thread, and the number of repetitions."""

    experiments: tuple[str, ...] = ("characters", "words")
    turns: int = 7
    seed: int = 0
    quick: bool = False


@dataclass(frozen=True)
class CopySettings:
    """A small network that learns to copy the symbol from some positions earlier."""

    attention: str
    distances: tuple[int, ...] = (1, 3)
    symbols: int = 12
    segment: int = 32
    width: int = 32
    heads: int = 4
    layers: int = 2
    batch: int = 32
    updates: int = 200
    learning_rate: float = 3e-3
    seed: int = 0


AnySettings = Settings | CountSettings | CostSettings | CopySettings


PEAK = dict.fromkeys(FOUR, 1e-2)
ALONE = {**PEAK, "relative-conv": 2e-2}
"""Learning rates by attention, with and without a memory: the best on characters of those tried in ``peaks``."""
TRIED = (2e-3, 5e-3, 1e-2, 2e-2)


def over(base: Settings, **others: Settings) -> dict[str, AnySettings]:
    """The base settings for each attention with its own learning rate, and the other variants."""
    scale = base.peak / Settings.peak
    return {**{name: replace(base, attention=name, peak=scale * PEAK[name]) for name in FOUR}, **others}


CHARACTERS = Settings("characters")
CONV = replace(CHARACTERS, attention="relative-conv", peak=PEAK["relative-conv"])
TRIAL = replace(CHARACTERS, updates=600, validated=50_000, valid_from=300_000)
WORDS = Settings("words", batch=8, layers=2, updates=500, warmup=120, peak=6e-3, validated=50_000)
RECORDED = Settings(
    "characters", width=32, layers=1, hidden=64, segment=32, memory=32, batch=8, updates=400, warmup=100, peak=5e-3,
    validated=20_000,
)  # fmt: skip

EXPERIMENTS: dict[str, dict[str, AnySettings]] = {
    "counts": {"characters": CountSettings("characters"), "words": CountSettings("words", WORDS.validated)},
    "peaks": {
        f"{name}{ending}-{peak:g}": replace(TRIAL, attention=name, peak=peak, memory=memory)
        for ending, memory in (("", TRIAL.memory), ("-alone", 0))
        for name in FOUR
        for peak in TRIED
    },
    "characters": over(
        CHARACTERS,
        **{
            **{f"{name}-alone": replace(CHARACTERS, attention=name, memory=0, peak=ALONE[name]) for name in FOUR},
            "relative-conv-reference": replace(CONV, options={"mode": "reference"}),
        },
    ),
    "words": over(
        WORDS,
        **{
            f"{name}-scaled": replace(WORDS, attention=name, options={"scaled": True})
            for name in ("relative", "relative-conv")
        },
    ),
    "copying": {name: CopySettings(name) for name in FOUR},
    "recorded": over(RECORDED),
    "costs": {"all": CostSettings()},
}
"""Settings by experiment and variant."""

ON_REQUEST: dict[str, dict[str, Settings]] = {}
NETWORKS, ONCE = 3, ("counts", "peaks", "recorded", "costs")
"""Number of networks per variant, and the experiments that run only once."""


def tiny(settings: AnySettings) -> AnySettings:
    """Settings reduced to a few steps, for a quick test run."""
    if isinstance(settings, CostSettings):
        return replace(settings, turns=1, quick=True)
    if isinstance(settings, CopySettings):
        return replace(settings, updates=3, batch=2)
    if isinstance(settings, CountSettings):
        return replace(settings, validated=1000)
    return replace(
        settings, updates=3, width=16, hidden=16, layers=1, batch=2, segment=8, memory=settings.memory and 8,
        validated=100,
    )  # fmt: skip
