"""How different the heads of a layer are (spec §6.5): distances between their outputs, before they are merged."""

from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from dualform.attention import Heads


@torch.no_grad()
def head_distances(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[dict[str, float]]:
    """For each attention layer the mean distance of two heads at a token; also over the mean size of an output."""
    seen: list[Tensor] = []

    def note(module: Any, args: tuple[Tensor, ...], options: dict[str, Any], output: Tensor) -> None:
        seen.append(module.head_outputs(*args, **options))

    layers = [each for each in model.modules() if isinstance(each, Heads)]
    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    there = torch.ones(seen[0].shape[0], seen[0].shape[2], dtype=torch.bool) if len(inputs) == 1 else ~inputs[1]
    found = []
    for heads in seen:  # b H n d
        o = heads.transpose(1, 2)[there]  # tokens H d
        apart = [(o[:, s] - o[:, t]).norm(dim=-1).mean() for s, t in combinations(range(o.shape[1]), 2)]
        raw = float(torch.stack(apart).mean())
        found.append({"raw": raw, "normalised": raw / float(o.norm(dim=-1).mean())})
    return found
