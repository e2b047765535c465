"""Settings of all experiments: those of Irie, Csordás, Schmidhuber (2022), and smaller ones for two cores."""

from dataclasses import dataclass, replace
from typing import Literal

IMAGES = ("mnist", "fashion-mnist", "cifar10")


@dataclass(frozen=True)
class Phase:
    """A number of updates on one data set, or on several merged ones."""

    sets: tuple[str, ...]
    updates: int


@dataclass(frozen=True)
class ImageSettings:
    """A perceptron on images."""

    phases: tuple[Phase, ...]
    seed: int = 0
    widths: tuple[int, ...] = (800, 800)
    batch: int = 128
    learning_rate: float = 3e-3
    momentum: float = 0.9
    clip: float | None = 1.0
    """Maximum gradient norm; the sources leave open whether the paper's runs clipped."""
    dtype: Literal["float16", "float32", "float64"] = "float16"
    test_images: int = 10_000
    """Number of test images queried per data set."""
    small: bool = False
    """Whether to use the small part of CIFAR-10."""

    @property
    def updates(self) -> int:
        """Number of updates over all phases."""
        return sum(phase.updates for phase in self.phases)

    @property
    def sets(self) -> tuple[str, ...]:
        """The data sets in order of first use."""
        return tuple(dict.fromkeys(name for phase in self.phases for name in phase.sets))


@dataclass(frozen=True)
class LanguageSettings:
    """An LSTM on a text."""

    text: Literal["aesop", "wikitext-2"]
    """Aesop's fables by characters, WikiText-2 by words."""
    updates: int
    hidden: int
    embedding: int | None
    batch: int
    unroll: int
    learning_rate: float
    clip: float
    reset: float
    """Probability of resetting the state at an update; it is always reset where the text starts over."""
    prompt: int
    prompts: int
    """Number of tokens per prompt, and number of prompts per part of the text."""
    dropout: float = 0.0
    decay: float = 1e-7
    seed: int = 0
    dtype: Literal["float16", "float32", "float64"] = "float32"
    saved_every: int = 250
    """Updates between checkpoints."""
    test_tokens: int = 250_000


Settings = ImageSettings | LanguageSettings

AESOP = LanguageSettings("aesop", 5000, 1024, 64, 64, 100, 1e-3, 1.0, 0.01, 100, 3)
WIKITEXT = LanguageSettings("wikitext-2", 10_000, 200, None, 128, 100, 3e-3, 0.3, 0.01, 100, 10, dropout=0.5)
SMALLER_AESOP = replace(AESOP, updates=1500, hidden=192, batch=16, unroll=50, learning_rate=3e-3, prompts=5)
SMALLER_WIKITEXT = replace(WIKITEXT, updates=3000, batch=20, unroll=35, prompts=5, test_tokens=50_000)

SINGLE = ImageSettings((Phase(("mnist",), 3000),))
LONGER = ImageSettings((Phase(("mnist",), 5000),))
JOINT = ImageSettings((Phase(("mnist", "fashion-mnist"), 5000),))
CONTINUAL = ImageSettings((Phase(("mnist",), 3000), Phase(("fashion-mnist",), 3000)), dtype="float32")
"""In float32, so that all 10,000 predictions at the switch match those of the checkpoint."""
CONTINUAL_LONG = ImageSettings((Phase(("mnist",), 3000), Phase(("fashion-mnist",), 7000)))

EXPERIMENTS: dict[str, dict[str, Settings]] = {
    "single": {
        "3000-clipped": SINGLE,
        "3000-unclipped": replace(SINGLE, clip=None),
        "5000-clipped": LONGER,
        "5000-unclipped": replace(LONGER, clip=None),
    },
    "kept": {"5000-clipped": LONGER},
    "joint": {"clipped": JOINT, "unclipped": replace(JOINT, clip=None)},
    "continual": {"clipped": CONTINUAL, "unclipped": replace(CONTINUAL, clip=None)},
    "continual-long": {"clipped": CONTINUAL_LONG, "unclipped": replace(CONTINUAL_LONG, clip=None)},
    "cifar10": {"clipped": ImageSettings((Phase(("cifar10",), 5000),), small=True, test_images=2000)},
    "aesop": {"cpu": SMALLER_AESOP},
    "aesop-reset": {"cpu": replace(SMALLER_AESOP, reset=1.0, prompt=50)},
    "wikitext-2": {"cpu": SMALLER_WIKITEXT},
}
"""By experiment and variant. Perceptrons run in the paper's own settings, with variants that the sources leave open;
language models in smaller ones, ``cpu``, since the paper's take hours on two cores and hundreds of gigabytes."""

NETWORKS = {"single": 5, "joint": 3, "continual": 3}
"""Number of networks per variant, where it is more than one."""

ON_REQUEST: dict[str, dict[str, Settings]] = {
    "aesop": {"paper": AESOP},
    "aesop-reset": {"paper": replace(AESOP, reset=1.0, prompt=50)},
    "wikitext-2": {"paper": WIKITEXT},
}
"""Variants that run only when they are named."""


def tiny(settings: Settings, updates: int = 6) -> Settings:
    """Settings reduced to a few steps, for a quick test run."""
    if isinstance(settings, LanguageSettings):
        return replace(
            settings, updates=updates, hidden=12, embedding=settings.embedding and 8, batch=4, unroll=10, prompt=8,
            prompts=2, saved_every=4, test_tokens=200,
        )  # fmt: skip
    phases = tuple(replace(phase, updates=updates) for phase in settings.phases)
    return replace(settings, phases=phases, widths=(24, 16), batch=16, test_images=40)
