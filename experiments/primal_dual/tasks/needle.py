"""A needle and a frequency: one channel contains a short pattern at a random place, the other a slow oscillation."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

LENGTH, MOTIF, HEIGHT, NOISE = 64, 8, 2.0, 0.5
CYCLES = (2, 5)


class Needle(NamedTuple):
    """Series with two channels, and their classes."""

    values: Float[Tensor, "n 64 2"]
    labels: Int[Tensor, " n"]


def needle(count: int, *, seed: int = 0) -> Needle:
    r"""Two channels of noise with deviation 1/2; the class 2a + f determines which signal is added to each.

    The first gets a motif of 8 steps and height 2 at a random place: constant (a = 0), or with alternating signs
    (a = 1). The second gets :math:`\sin(2\pi c\,t/64 + \varphi)` with a random phase and c = 2 (f = 0) or c = 5 cycles
    (f = 1).
    """
    random = torch.Generator().manual_seed(seed)
    values = NOISE * torch.randn(count, LENGTH, 2, generator=random)
    labels = torch.randint(4, (count,), generator=random)
    alternating, fast = labels // 2, labels % 2
    step = torch.arange(MOTIF)
    place = torch.randint(LENGTH - MOTIF + 1, (count, 1), generator=random) + step
    motif = HEIGHT * torch.where(alternating.unsqueeze(1) == 1, 1 - 2 * (step % 2), 1)
    values[:, :, 0].scatter_add_(1, place, motif)
    phase = 2 * math.pi * torch.rand(count, 1, generator=random)
    cycles = torch.tensor(CYCLES)[fast].unsqueeze(1)
    values[:, :, 1] += torch.sin(2 * math.pi * cycles * torch.arange(LENGTH) / LENGTH + phase)
    return Needle(values, labels)
