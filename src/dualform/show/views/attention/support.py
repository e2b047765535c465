"""Support tokens: what each adds to what the heads of a layer give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.attention import Heads
from dualform.svm import Support
from dualform.svm.expansion import By

SHOWN = 8
"""How many support tokens are shown one by one."""


@dataclass(frozen=True)
class SupportTokenView:
    """A token that one head attends to, or a window of tokens that the head pools."""

    head: int
    tokens: tuple[int, ...]
    name: str
    mass: float
    """Its attention weight; the weights of a head sum to 1."""
    log_dual: float
    share: float
    """Its share of the output of the chosen heads, measured along that output; all shares sum to 1."""


@dataclass(frozen=True)
class SupportTokens:
    """The support tokens of one head or of all heads: the largest one by one, the others summed."""

    by: By
    largest: list[SupportTokenView]
    others: int
    others_mass: float | None
    """None if several heads are shown, since attention weights of different heads do not add up."""
    others_share: float


def support_tokens(
    layer: Heads, support: Support, head: int | None, by: By, count: int, name: Callable[[Sequence[int]], str]
) -> SupportTokens:
    """The tokens that carry the output of one head, or of all heads, the largest first.

    ``count`` tokens are not padding. ``name`` gives the name of a window of tokens.
    """
    support = support if head is None else support.of(head=head)
    shares = shares_of(layer, support)
    order = {"mass": support.mass, "dual": support.log_dual, "adds": shares.abs()}[by].argsort(descending=True)
    lines, largest = list(support), []
    for i in order[:SHOWN].tolist():
        line = lines[i]
        tokens = tuple(token for token in members(layer, line.first, line.last) if token < count)
        largest.append(SupportTokenView(line.head, tokens, name(tokens), line.mass, line.log_dual, float(shares[i])))
    rest = order[SHOWN:]
    mass = float(support.mass[rest].sum()) if head is not None or layer.heads == 1 else None
    return SupportTokens(by, largest, len(rest), mass, float(shares[rest].sum()))


def shares_of(layer: Heads, support: Support) -> Float[Tensor, " r"]:
    r"""The share of each line in the layer's output, along it: :math:`y_r^\top y/\|y\|^2` with y = Σ y_r."""
    merged = support.parts.new_zeros(len(support), layer.heads, layer.size)
    merged[torch.arange(len(support)), support.head] = support.parts
    adds = merged.flatten(1) @ layer.out.weight.detach().to(merged).mT
    output = adds.sum(0)
    return adds @ output / output.square().sum().clamp(min=torch.finfo(output.dtype).tiny)


def members(layer: Heads, first: int, last: int) -> tuple[int, ...]:
    """The tokens of a window: consecutive tokens, or a block of patches if the layer pools a grid."""
    grid = getattr(layer, "grid", None)
    if grid is None or first == last:
        return tuple(range(first, last + 1))
    skip, width = getattr(layer, "class_tokens", 0), grid[1]
    (top, left), (bottom, right) = divmod(first - skip, width), divmod(last - skip, width)
    return tuple(skip + row * width + column for row in range(top, bottom + 1) for column in range(left, right + 1))
