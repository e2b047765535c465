"""Redundancy of the heads of a layer (spec §6.5): distances between their outputs, before heads are merged."""

from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from dualform.attention import Heads


@torch.no_grad()
def head_distances(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[dict[str, float]]:
    """Mean distance of two heads at a token for each attention layer, raw and divided by the mean output norm."""
    outputs: list[Tensor] = []

    def note(module: Any, args: tuple[Tensor, ...], options: dict[str, Any], output: Tensor) -> None:
        outputs.append(module.head_outputs(*args, **options))

    layers = [module for module in model.modules() if isinstance(module, Heads)]
    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    shape = outputs[0].shape[0], outputs[0].shape[2]  # b n
    tokens = torch.ones(shape, dtype=torch.bool) if len(inputs) == 1 else ~inputs[1]
    distances = []
    for heads in outputs:  # b H n d
        o = heads.transpose(1, 2)[tokens]  # tokens H d
        pairs = [(o[:, s] - o[:, t]).norm(dim=-1).mean() for s, t in combinations(range(o.shape[1]), 2)]
        raw = float(torch.stack(pairs).mean())
        distances.append({"raw": raw, "normalised": raw / float(o.norm(dim=-1).mean())})
    return distances
