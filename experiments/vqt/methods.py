"""Tuning methods by name: the network, and which frozen outputs of its backbone are computed only once."""

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
    """A network, a function computed once for each training image, and the logits from its result.

    The outputs of a frozen backbone do not change, so they are computed once: features for a probe, tokens of all
    layers for query tokens. A trained backbone gets the images themselves.
    """

    model: Tuned
    once: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]


def way(backbone: ViT, settings: TransferSettings) -> Way:
    """The untrained network of the settings, determined by their seed."""
    torch.manual_seed(settings.seed)
    return reading(make(backbone, settings.method, settings.tokens, CLASSES))


def make(backbone: ViT, method: str, tokens: int, classes: int) -> Tuned:
    """Build the network of a method."""
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
    """How a network is trained: from the outputs of its backbone if they do not change."""
    if not model.detach_backbone:
        return Way(model, lambda x: x, model)
    if isinstance(model, VisualQueryTuning) and model.queries.requires_grad:
        return Way(model, model.states, model.from_states)
    return Way(model, torch.no_grad()(model.features), model.head)


def selected(way: Way, head: Tensor, settings: TransferSettings) -> Way:
    """The network with a new head on the features that a head trained with a group lasso weights most."""
    torch.manual_seed(settings.seed)
    return reading(way.model.refit(select(head, settings.keep)))
