"""Copying task: output the random symbol that stood one or three positions earlier."""

from typing import Any

import torch
from torch import Tensor, nn

from dualform.models import SegmentLM

from .settings import CopySettings

EVERY, ENOUGH = 20, 0.95
"""Updates between evaluations, and the accuracy that counts as learned."""


def train_copying(settings: CopySettings) -> dict[str, Any]:
    """For each distance: the accuracy on new symbols after the last update, and the update by which it was learned."""
    return {str(back): of_distance(settings, back) for back in settings.distances}


def of_distance(settings: CopySettings, back: int) -> dict[str, Any]:
    """Train one network on new symbols at every update."""
    torch.manual_seed(settings.seed)
    reach: dict[str, Any] = {"reach": settings.segment} if settings.attention.startswith("relative") else {}
    model = SegmentLM(
        settings.symbols, width=settings.width, heads=settings.heads, layers=settings.layers, hidden=2 * settings.width,
        attention=settings.attention, memory=0, **reach,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    accuracy, learned = 0.0, None
    for update in range(1, settings.updates + 1):
        tokens = torch.randint(settings.symbols, (settings.batch, settings.segment))
        logits, _ = model(tokens)
        nn.functional.cross_entropy(logits[:, back:].flatten(0, 1), tokens[:, :-back].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if update % EVERY == 0 or update == settings.updates:
            accuracy = right(model, settings, back)
            learned = update if learned is None and accuracy >= ENOUGH else learned
    return {"accuracy": accuracy, "learned": learned}


@torch.no_grad()
def right(model: nn.Module, settings: CopySettings, back: int) -> float:
    """Accuracy on new sequences, at positions where the symbol to copy exists."""
    tokens: Tensor = torch.randint(settings.symbols, (4 * settings.batch, settings.segment))
    said = model(tokens)[0].argmax(-1)
    return float((said[:, back:] == tokens[:, :-back]).double().mean())
