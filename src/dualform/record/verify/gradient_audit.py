"""What the gradients say, found out for many steps at once.

Between its backward pass and the step a gradient may only have changed by one factor, and it must be the product of the
slots that were copied. What is neither is marked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .gradient_follower import GradientFollower, PassGradient, ProbedSlots

UNEVEN = (
    "its gradient was changed between backward and step, and not by one common factor (clip_grad_value_, noise, "
    "centralisation, a mask?): the memory explains only the common factor"
)
NO_PRODUCT = (
    "its gradient is not the sum of the recorded errors and inputs (a penalty on the weights in the loss, functional "
    "use of the weight, a hook that changes gradients, some entries changed before the step, or a gradient left over "
    "from before?): the memory misses the difference"
)

OnMark = Callable[[str, str, str, int], None]


@dataclass(slots=True)
class GradientFactors:
    """A parameter in a step: the scale of its last pass (None: not known), of each pass relative to that, and whether
    what was noticed about it is marked already.
    """

    scale: float | None
    factors: list[float]
    marked: bool = False


def audit(
    follower: GradientFollower, steps: Sequence[int], passes: Sequence[Sequence[PassGradient]], mark: OnMark
) -> list[GradientFactors]:
    """Look at the watched entries of a parameter in the passes that each of some steps used up."""
    flat = [each for of_step in passes for each in of_step]
    ratios, uneven = np.full(len(flat), np.nan), np.zeros(len(flat), bool)
    for group in _same_entries(flat):
        ratios[group], uneven[group] = _ratios([flat[i] for i in group], follower.eps)
    factors, off = ratios.tolist(), uneven.tolist()
    found, begin = [], 0
    for step, of_step in zip(steps, passes, strict=True):
        end = begin + len(of_step)
        for i, each in enumerate(of_step, begin):
            if off[i]:
                mark("changed-unevenly", follower.name, UNEVEN, step)
            if each.left_over:
                mark("not-a-product", follower.name, NO_PRODUCT, step)
        marked = any(off[begin:end]) or any(each.left_over for each in of_step)
        found.append(_found(factors[begin:end], marked))
        begin = end
    return found


def _found(ratios: list[float], marked: bool) -> GradientFactors:
    """What one pass after the other was multiplied with until the step."""
    if not ratios:
        return GradientFactors(1.0, [], marked)
    factors = [1.0]
    for ratio in reversed(ratios[:-1]):
        factors.append(factors[-1] if np.isnan(ratio) else factors[-1] * ratio)
    return GradientFactors(None if np.isnan(ratios[-1]) else ratios[-1], factors[::-1], marked)


def scale_of(follower: GradientFollower) -> float:
    """By what the gradient was multiplied since its last pass; 1 where that cannot be seen."""
    last = follower.passes[-1]
    if last.later is None or last.later == last.after:
        return 1.0
    ratios, _ = _ratios([last], follower.eps)
    return 1.0 if np.isnan(ratios[0]) else float(ratios[0])


def _same_entries(passes: Sequence[PassGradient]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, each in enumerate(passes):
        if each.later is not None:
            groups.setdefault(id(each.watched), []).append(i)
    return list(groups.values())


def _ratios(passes: Sequence[PassGradient], eps: float) -> tuple[Float[np.ndarray, " p"], Bool[np.ndarray, " p"]]:
    """By what the gradient was multiplied after each pass (NaN: cannot be seen); whether by more than one number."""
    ratios, uneven = np.ones(len(passes)), np.zeros(len(passes), bool)
    watched = passes[0].watched
    changed = [i for i, each in enumerate(passes) if each.later != each.after or watched.zero(each.after)]
    if changed:
        after = watched.values([passes[i].after for i in changed])
        later = watched.values([passes[i].later or b"" for i in changed])
        power = np.einsum("pk,pk->p", after, after)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.einsum("pk,pk->p", later, after) / power
            off = np.abs(later - ratio[:, None] * after).max(1)
        ratios[changed] = np.where(power > 0, ratio, np.nan)
        uneven[changed] = (power > 0) & (off > 64 * eps * np.abs(later).max(1))
    return ratios, uneven


# ------------------------------------------------------------------------------------------- probes of the whole


def probed(follower: GradientFollower, passes: Sequence[PassGradient], factors: Sequence[float]) -> ProbedSlots:
    """What the slots of some passes put into a gradient, seen through its probe: each pass with its factor."""
    numbers, power, rows, eps = None, 0.0, 0, follower.eps
    for one, factor in zip(passes, factors, strict=True):
        for part, slots in zip(one.probed, one.slots, strict=True):
            part = part.cpu() if factor == 1.0 else part.cpu() * factor
            numbers = part if numbers is None else numbers + part
            power += factor**2 * slots.power(follower.name)
            rows += slots.end - slots.begin
            eps = max(eps, slots.eps)
    return ProbedSlots(follower.probe.nothing() if numbers is None else numbers, power, rows, eps)


def not_products(
    sums: Sequence[ProbedSlots], scales: Sequence[float], gradients: Sequence[Tensor]
) -> Bool[np.ndarray, " s"]:
    """In which steps the probe of a gradient is not that of its slots, beyond what rounding explains.

    A sum of m products rounds off about √m times; more where large sums cancel, as with rows in an unlucky order.
    """
    rows, eps, power = (np.array([getattr(each, name) for each in sums]) for name in ("rows", "eps", "power"))
    product = torch.stack([each.numbers for each in sums]) * torch.tensor(scales, dtype=sums[0].numbers.dtype)[:, None]
    off = torch.stack([gradient.cpu() for gradient in gradients]).sub_(product).norm(dim=1).double().numpy()
    size = np.abs(scales) * np.sqrt(power) + product.norm(dim=1).double().numpy()
    return ~(off <= eps * np.maximum(8 + 2.4 * np.sqrt(rows), 0.08 * rows) * size + 1e-30)
