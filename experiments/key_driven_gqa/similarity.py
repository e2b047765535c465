"""How alike the heads are that share keys and values: what perturbed groups are meant to change."""

from typing import Any

import torch
from torch import Tensor, nn

from dualform.attention import GroupedQueryAttention, Heads


@torch.no_grad()
def similarity(model: nn.Module, x: Tensor) -> list[dict[str, float | None]]:
    """Layer by layer the mean cosine between attention maps, centred, of two heads: of one run, and of two runs.

    Runs are those of plain groups, H/G heads each, whatever the allocation. Without noise, as maps always are.
    """
    found = []

    def look(layer: Any, args: tuple, output: Tensor) -> None:
        found.append(of_layer(layer, args[0]))

    handles = [each.register_forward_hook(look) for each in model.modules() if isinstance(each, Heads)]
    model.eval()
    model(x)
    for handle in handles:
        handle.remove()
    return found


def of_layer(layer: Heads, tokens: Tensor) -> dict[str, float | None]:
    """The same of one layer; None where there are no such two heads."""
    maps = layer.weights(tokens)
    maps = nn.functional.normalize((maps - maps.mean(-1, keepdim=True)).flatten(2), dim=-1)
    cosines = (maps @ maps.mT).mean(0)
    groups = layer.kv_heads if isinstance(layer, GroupedQueryAttention) else layer.heads
    run = torch.arange(layer.heads) * groups // layer.heads
    same = (run[:, None] == run) & ~torch.eye(layer.heads, dtype=torch.bool)
    pairs = {"within": same, "between": run[:, None] != run}
    return {name: float(cosines[each].mean()) if bool(each.any()) else None for name, each in pairs.items()}
