"""What a step did to each parameter: as far as it is known while training runs, and what is found out of that later."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualform.store import ParameterStep
from dualform.types import Transition

from ..slots import Batch, CallSlots
from ..verify import GradientFactors, GradientFollower, PassGradient, gradient_eps

NOTHING = torch.empty(0)


@dataclass(slots=True)
class ParameterUpdate:
    """One parameter in a step, as far as it is known while training runs."""

    follower: GradientFollower
    passes: list[PassGradient]
    transition: Transition | None
    settings: Mapping[str, float]
    inner: float
    """What the optimiser itself multiplies the gradient with before it uses it (1 / loss scale)."""
    bare: bool
    """Whether it has a gradient that no slots of this process made."""
    probe: Tensor = NOTHING
    """The gradient as the step uses it, seen through its probe."""
    sample: bytes = b""
    state_sample: bytes = b""


class NewBatch(NamedTuple):
    """A batch that a step uses for the first time: the step, which of its batches, how many examples."""

    step: int
    number: int
    size: int
    batch: Batch


def new_batches(
    steps: Iterable[tuple[int, Sequence[ParameterUpdate]]], size_of: Callable[[CallSlots], int]
) -> list[NewBatch]:
    """The batches that steps use for the first time, in their order."""
    new: dict[int, NewBatch] = {}
    for step, moved in steps:
        number = 0
        for each in moved:
            for added in each.passes:
                for slots in added.slots:
                    batch = slots.batch
                    if batch.visit < 0 and id(batch) not in new and slots.layer.keep != "ledger":
                        new[id(batch)] = NewBatch(step, number, size_of(slots), batch)
                        number += 1
    return list(new.values())


def scales_of(found: Sequence[GradientFactors]) -> list[float]:
    """The gradient scale of each parameter; where all watched entries were zero, that of the others."""
    if all(each.scale is not None for each in found):
        return [each.scale or 0.0 for each in found]
    known = [each.scale for each in found if each.scale is not None and each.factors]
    common = float(np.median(known)) if known else 1.0
    return [common if each.scale is None else each.scale for each in found]


def factors_of(
    moved: Sequence[ParameterUpdate], found: Sequence[GradientFactors]
) -> Iterable[tuple[CallSlots, float, float]]:
    """The slots that a step used up, and what they count for in the gradients of weight and bias."""
    used: dict[int, tuple[CallSlots, list[float]]] = {}
    for each, about in zip(moved, found, strict=True):
        for added, factor in zip(each.passes, about.factors, strict=True):
            for slots in added.slots:
                _, factors = used.setdefault(id(slots), (slots, [0.0, 0.0]))
                factors[0 if each.follower.name in slots.layer.weights else 1] = factor
    return [(slots, weight, bias) for slots, (weight, bias) in used.values()]


def line_of(moved: ParameterUpdate, scale: float) -> ParameterStep:
    """What the memory keeps of it."""
    return ParameterStep(
        moved.follower.name, moved.transition, scale * moved.inner, moved.settings, moved.sample, moved.state_sample,
        gradient_eps(moved.passes),
    )  # fmt: skip
