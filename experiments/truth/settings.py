"""Settings of all trainings: which network, trained how, on which examples, and how many trainings judge the scores."""

from dataclasses import dataclass, replace
from typing import Any, Literal

DataName = Literal["digits", "mnist", "fashion-mnist", "wikitext-2"]
NETWORKS = 3
"""Networks of each variant, from other first weights and in another order of examples."""


@dataclass(frozen=True)
class TrainingSettings:
    """One training, and the queries that are asked about it."""

    network: str
    data: DataName
    optimizer: dict[str, Any]
    examples: int
    queries: int
    batch: int
    epochs: int
    seed: int = 0


@dataclass(frozen=True)
class RemovalSettings(TrainingSettings):
    """Scores are judged by trainings without random subsets, and without single examples."""

    drops: tuple[float, ...] = (0.02, 0.1, 0.5)
    subsets: int = 100
    alone: int = 5
    """Queries whose strongest examples are left out one at a time, in the first network."""
    strongest: int = 20


@dataclass(frozen=True)
class WrongLabelSettings(TrainingSettings):
    """A share of the training labels is another one; do scores find them?"""

    wrong: float = 0.1


@dataclass(frozen=True)
class FlipSettings(TrainingSettings):
    """How many examples must go until a prediction flips?"""

    most: int = 512


SGD = {"kind": "SGD", "lr": 0.1}
ADAM = {"kind": "Adam", "lr": 1e-3}
ADAMW = {"kind": "AdamW", "lr": 1e-3}
DIGITS: dict[str, Any] = {"data": "digits", "examples": 1000, "queries": 100, "batch": 50, "epochs": 15}
MNIST: dict[str, Any] = {"data": "mnist", "examples": 6000, "batch": 64, "epochs": 1}

Settings = RemovalSettings | WrongLabelSettings | FlipSettings

EXPERIMENTS: dict[str, dict[str, Settings]] = {
    "digits": {
        "sgd": RemovalSettings("digits-relu", optimizer=SGD, **DIGITS),
        "sgd-gelu": RemovalSettings("digits-gelu", optimizer=SGD, **DIGITS),
        "momentum": RemovalSettings("digits-relu", optimizer={"kind": "SGD", "lr": 0.02, "momentum": 0.9}, **DIGITS),
        "adam": RemovalSettings("digits-relu", optimizer=ADAM, **DIGITS),
        "adam-gelu": RemovalSettings("digits-gelu", optimizer=ADAM | {"eps": 1e-3}, **DIGITS),
    },
    "mnist": {"adamw": RemovalSettings("mnist", optimizer=ADAMW, queries=100, **MNIST)},
    "cnn": {
        "momentum": RemovalSettings(
            "cnn", "fashion-mnist", {"kind": "SGD", "lr": 0.01, "momentum": 0.9}, examples=2000, queries=20, batch=50,
            epochs=4, subsets=50, alone=2,
        ),
    },
    "language": {
        "adamw": RemovalSettings(
            "language", "wikitext-2", ADAMW, examples=512, queries=20, batch=16, epochs=4, subsets=50, alone=2,
        ),
    },
    "wrong-labels": {
        "sgd": WrongLabelSettings("digits-relu", optimizer=SGD, **DIGITS),
        "adam": WrongLabelSettings("digits-relu", optimizer=ADAM, **DIGITS),
    },
    "flips": {"adamw": FlipSettings("mnist", optimizer=ADAMW, queries=40, **MNIST)},
}  # fmt: skip
"""Settings by experiment and variant."""
ON_REQUEST: dict[str, dict[str, Settings]] = {}


def tiny(settings: Settings) -> Settings:
    """Settings for a few steps only, to test that everything runs."""
    few: dict[str, Any] = {"examples": 40, "queries": 4, "batch": 10, "epochs": 1}
    if isinstance(settings, RemovalSettings):
        few |= {"subsets": 4, "alone": 1, "strongest": 2}
    if isinstance(settings, FlipSettings):
        few |= {"most": 4}
    return replace(settings, **few)
