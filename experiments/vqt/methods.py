"""Ways to tune a backbone, by name: the network, and how its training pictures are read."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.models import ViT
from dualform.tuning import (
    IntermediateProbe,
    Probe,
    Tuned,
    VisualQueryTuning,
    select,
    with_lora,
    with_prompts,
)  # fmt: skip

from .settings import TransferSettings

CLASSES, RANK, PROMPTS = 10, 4, 8


@dataclass(frozen=True)
class Way:
    """A network, what it makes of each training picture once and for all, and its logits from that.

    What a frozen backbone gives does not change, so it is kept: features for a probe, tokens of all layers for query
    tokens. A backbone that learns is given the pictures themselves.
    """

    model: Tuned
    once: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]


def way(backbone: ViT, settings: TransferSettings) -> Way:
    """The network of some settings, untrained; with their seed always the same."""
    torch.manual_seed(settings.seed)
    return reading(make(backbone, settings.method, settings.tokens, CLASSES))


def make(backbone: ViT, method: str, tokens: int, classes: int) -> Tuned:
    """The network of a method."""
    name, _, inside = method.partition("+")
    name = "vqt" if name.startswith("vqt") else name.partition("-")[0]
    adapted: dict[str, Callable[[], ViT]] = {
        "lora": lambda: with_lora(backbone, RANK),
        "prompts": lambda: with_prompts(backbone, PROMPTS),
        "full": lambda: copy.deepcopy(backbone).requires_grad_(True),
    }
    learns = (inside or name) in adapted
    vit = adapted[inside or name]() if learns else backbone
    if name == "vqt":
        return VisualQueryTuning(vit, classes, tokens=tokens, detach_backbone=not learns)
    if name == "intermediate":
        return IntermediateProbe(vit, classes)
    return Probe(vit, classes, detach_backbone=not learns, normalise=method == "linear-unit")


def reading(model: Tuned) -> Way:
    """How a network is trained: from what its backbone gives, where that does not change."""
    if not model.detach_backbone:
        return Way(model, lambda x: x, model)
    if isinstance(model, VisualQueryTuning) and model.queries.requires_grad:
        return Way(model, model.states, model.from_states)
    return Way(model, torch.no_grad()(model.features), model.head)


def selected(way: Way, head: Tensor, settings: TransferSettings) -> Way:
    """A new head on the features that a head under a group lasso makes most of."""
    torch.manual_seed(settings.seed)
    return reading(way.model.refit(select(head, settings.keep)))
