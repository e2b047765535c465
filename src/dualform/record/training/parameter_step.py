"""A step of each parameter: what is read while training runs, and what is computed from it later."""

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
    """A step of one parameter, as it is read while training runs."""

    follower: GradientFollower
    passes: list[PassGradient]
    transition: Transition | None
    settings: Mapping[str, float]
    inner: float
    """The factor by which the optimiser itself multiplies the gradient before use (1 / loss scale)."""
    bare: bool
    """Whether it has a gradient, but no slots of this process."""
    probe: Tensor = NOTHING
    """The probe of the gradient as the step uses it."""
    sample: bytes = b""
    state_sample: bytes = b""


class NewBatch(NamedTuple):
    """A batch that a step uses for the first time: the step, the number of the batch in it, its number of examples."""

    step: int
    number: int
    size: int
    batch: Batch


def new_batches(
    steps: Iterable[tuple[int, Sequence[ParameterUpdate]]], size_of: Callable[[CallSlots], int]
) -> list[NewBatch]:
    """The batches that steps use for the first time, in their order."""
    new: dict[int, NewBatch] = {}
    for step, updates in steps:
        number = 0
        for update in updates:
            for gradient_pass in update.passes:
                for slots in gradient_pass.slots:
                    batch = slots.batch
                    if batch.visit < 0 and id(batch) not in new and slots.layer.keep != "ledger":
                        new[id(batch)] = NewBatch(step, number, size_of(slots), batch)
                        number += 1
    return list(new.values())


def scales_of(factors: Sequence[GradientFactors]) -> list[float]:
    """The gradient scale of each parameter; the median scale where all watched entries of a gradient are zero."""
    if all(audited.scale is not None for audited in factors):
        return [audited.scale or 0.0 for audited in factors]
    measured = [audited.scale for audited in factors if audited.scale is not None and audited.factors]
    common = float(np.median(measured)) if measured else 1.0
    return [common if audited.scale is None else audited.scale for audited in factors]


def factors_of(
    updates: Sequence[ParameterUpdate], step_factors: Sequence[GradientFactors]
) -> Iterable[tuple[CallSlots, float, float]]:
    """The slots that a step used up, and their factors in the gradients of weight and bias."""
    used: dict[int, tuple[CallSlots, list[float]]] = {}
    for update, audited in zip(updates, step_factors, strict=True):
        for gradient_pass, factor in zip(update.passes, audited.factors, strict=True):
            for slots in gradient_pass.slots:
                _, factors = used.setdefault(id(slots), (slots, [0.0, 0.0]))
                factors[0 if update.follower.name in slots.layer.weights else 1] = factor
    return [(slots, weight, bias) for slots, (weight, bias) in used.values()]


def line_of(update: ParameterUpdate, scale: float) -> ParameterStep:
    """The row of a parameter's step in the table of steps."""
    return ParameterStep(
        update.follower.name, update.transition, scale * update.inner, update.settings, update.sample,
        update.state_sample, gradient_eps(update.passes),
    )  # fmt: skip
