"""Settings of all trainings. VTAB-1k and ImageNet checkpoints were not available: a small backbone is trained here."""

from dataclasses import dataclass, replace

SOURCE = "fashion-mnist"
TARGETS = ("mnist", "cifar10", "small-digits")
"""The backbone is trained on the source data set, and tuned on 1,000 images of each target."""


@dataclass(frozen=True)
class BackboneSettings:
    """A small vision transformer, trained from scratch on all images of a data set, 3 × 32 × 32 each."""

    source: str = SOURCE
    size: int = 32
    patch: int = 4
    width: int = 64
    heads: int = 4
    layers: int = 6
    learning_rate: float = 1e-3
    decay: float = 0.05
    batch: int = 64
    epochs: int = 6
    most: int = 0
    """Number of training images; 0 for all."""
    seed: int = 0


@dataclass(frozen=True)
class TransferSettings:
    """One method of tuning the backbone, on one target."""

    target: str
    method: str
    rates: tuple[tuple[float, float], ...]
    """Grid of learning rates (head and query tokens; inside the backbone), chosen by validation accuracy."""
    tokens: int = 0
    keep: float = 1.0
    """The share of features that a group lasso keeps; a new head is then trained on them."""
    lasso: float = 1e-4
    labelled: int = 1000
    validation: int = 200
    """How many labelled images choose the rate; the final network is trained on all labelled images."""
    epochs: int = 20
    trial_epochs: int = 10
    """Epochs of a training that only chooses the rate."""
    batch: int = 64
    tests: int = 0
    """Number of test images; 0 for all."""
    seed: int = 0


@dataclass(frozen=True)
class CostSettings:
    """Memory and time of an update at the shape of ViT-small, on random images."""

    size: int = 224
    patch: int = 16
    width: int = 384
    heads: int = 6
    layers: int = 12
    classes: int = 100
    batch: int = 8
    turns: int = 3
    seed: int = 0


FROZEN = tuple((rate, 0.0) for rate in (1.0, 0.3, 0.1, 0.03, 0.01))
LEARNING = tuple((outside, inside) for outside in (0.1, 0.03) for inside in (1e-2, 3e-3, 1e-3, 3e-4))
"""Grids of learning rates: five for a frozen backbone, eight for a trained one."""
METHODS: dict[str, dict] = {
    "linear": {"rates": FROZEN},
    "linear-unit": {"rates": FROZEN},
    "intermediate": {"rates": FROZEN},
    "intermediate-select": {"rates": FROZEN, "keep": 0.2},
    "vqt-1": {"rates": FROZEN, "tokens": 1},
    "vqt-5": {"rates": FROZEN, "tokens": 5},
    "vqt-5-select": {"rates": FROZEN, "tokens": 5, "keep": 0.2},
    "prompts": {"rates": LEARNING},
    "lora": {"rates": LEARNING},
    "vqt-5+prompts": {"rates": LEARNING, "tokens": 5},
    "vqt-5+lora": {"rates": LEARNING, "tokens": 5},
    "full": {"rates": LEARNING},
}
"""Tuning methods; ``methods.py`` implements them."""

AnySettings = BackboneSettings | TransferSettings | CostSettings

EXPERIMENTS: dict[str, dict[str, AnySettings]] = {
    "backbone": {SOURCE: BackboneSettings()},
    **{
        target: {method: TransferSettings(target, method, **more) for method, more in METHODS.items()}
        for target in TARGETS
    },
    "cost": {"vit-small": CostSettings()},
    "recorded": {target: TransferSettings(target, "vqt-5", ((0.01, 0.0),), tokens=5) for target in TARGETS},
}
"""Settings by experiment and variant. All but ``cost`` need the backbone."""
ON_REQUEST: dict[str, dict[str, AnySettings]] = {}
NETWORKS, ONCE = 3, ("backbone", "cost", "recorded")
"""The number of networks per variant, and the experiments that run only once."""


def tiny(settings: AnySettings) -> AnySettings:
    """Settings for a few steps only, to test that everything runs."""
    if isinstance(settings, BackboneSettings):
        return replace(settings, width=16, layers=2, epochs=1, most=128)
    if isinstance(settings, TransferSettings):
        few = {
            "labelled": 40,
            "validation": 10,
            "epochs": 2,
            "trial_epochs": 1,
            "batch": 8,
            "tests": 20,
            "rates": settings.rates[:2],
        }
        return replace(settings, **few)
    return replace(settings, size=32, patch=8, width=32, heads=4, layers=2, classes=5, batch=2, turns=1)
