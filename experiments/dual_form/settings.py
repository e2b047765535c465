"""What is trained, and how: the settings of Irie, Csordás, Schmidhuber (2022), and smaller ones for two cores."""

from dataclasses import dataclass, replace
from typing import Literal

IMAGES = ("mnist", "fashion-mnist", "cifar10")


@dataclass(frozen=True)
class Phase:
    """Some updates on the images of one data set, or of several that are merged."""

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
    """The gradient norm is clipped there; the sources leave open whether it was."""
    dtype: Literal["float16", "float32", "float64"] = "float16"
    test_images: int = 10_000
    """How many are asked about, of each data set."""
    small: bool = False
    """Whether a part of CIFAR-10 will do."""

    @property
    def updates(self) -> int:
        """All of them."""
        return sum(phase.updates for phase in self.phases)

    @property
    def sets(self) -> tuple[str, ...]:
        """The data sets in the order in which they come."""
        return tuple(dict.fromkeys(name for phase in self.phases for name in phase.sets))


SINGLE = ImageSettings((Phase(("mnist",), 3000),))
LONGER = ImageSettings((Phase(("mnist",), 5000),))
JOINT = ImageSettings((Phase(("mnist", "fashion-mnist"), 5000),))
CONTINUAL = ImageSettings((Phase(("mnist",), 3000), Phase(("fashion-mnist",), 3000)), dtype="float32")
"""In float32: all 10,000 predictions at the switch are to be those of the checkpoint."""
CONTINUAL_LONG = ImageSettings((Phase(("mnist",), 3000), Phase(("fashion-mnist",), 7000)))

EXPERIMENTS: dict[str, dict[str, ImageSettings]] = {
    "single": {
        "3000-clipped": SINGLE,
        "3000-unclipped": replace(SINGLE, clip=None),
        "5000-clipped": LONGER,
        "5000-unclipped": replace(LONGER, clip=None),
    },
    "joint": {"clipped": JOINT, "unclipped": replace(JOINT, clip=None)},
    "continual": {"clipped": CONTINUAL, "unclipped": replace(CONTINUAL, clip=None)},
    "continual-long": {"clipped": CONTINUAL_LONG, "unclipped": replace(CONTINUAL_LONG, clip=None)},
    "cifar10": {"clipped": ImageSettings((Phase(("cifar10",), 5000),), small=True, test_images=2000)},
}
"""By experiment and variant. The paper's own settings all run on two cores; the sources leave the variants open."""


def tiny(settings: ImageSettings, updates: int = 6) -> ImageSettings:
    """The same for a few steps, to see that all of it runs."""
    phases = tuple(replace(phase, updates=updates) for phase in settings.phases)
    return replace(settings, phases=phases, widths=(24, 16), batch=16, test_images=40)
