"""Similarity of heads that share keys and values, which perturbed groups are meant to lower."""

from typing import Any

import torch
from torch import Tensor, nn

from dualform.attention import GroupedQueryAttention, Heads


@torch.no_grad()
def similarity(model: nn.Module, x: Tensor) -> list[dict[str, float | None]]:
    """Mean cosine between the centred attention maps of two heads, within and between groups, for each layer.

    Groups are those of plain GQA, H/G consecutive heads each, whatever the allocation. Maps contain no noise.
    """
    layers = []

    def look(layer: Any, args: tuple, output: Tensor) -> None:
        layers.append(of_layer(layer, args[0]))

    handles = [module.register_forward_hook(look) for module in model.modules() if isinstance(module, Heads)]
    model.eval()
    model(x)
    for handle in handles:
        handle.remove()
    return layers


def of_layer(layer: Heads, tokens: Tensor) -> dict[str, float | None]:
    """The similarities of one layer; None if there is no such pair of heads."""
    maps = layer.weights(tokens)
    maps = nn.functional.normalize((maps - maps.mean(-1, keepdim=True)).flatten(2), dim=-1)
    cosines = (maps @ maps.mT).mean(0)
    groups = layer.kv_heads if isinstance(layer, GroupedQueryAttention) else layer.heads
    group = torch.arange(layer.heads) * groups // layer.heads
    same = (group[:, None] == group) & ~torch.eye(layer.heads, dtype=torch.bool)
    masks = {"within": same, "between": group[:, None] != group}
    return {name: float(cosines[mask].mean()) if bool(mask.any()) else None for name, mask in masks.items()}
