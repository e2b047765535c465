"""Audits gradients, for many steps at once.

Between its backward pass and the step a gradient may only be multiplied by one factor, and it must be the product of
the slots that were copied. Any other gradient is marked.
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
    """Factors of a parameter's gradient in a step: of its last pass (None: not known), and of each pass relative to
    that one. ``marked`` if its gradient is marked already.
    """

    scale: float | None
    factors: list[float]
    marked: bool = False


def audit(
    follower: GradientFollower, steps: Sequence[int], passes: Sequence[Sequence[PassGradient]], mark: OnMark
) -> list[GradientFactors]:
    """Audit the watched entries of a parameter in the backward passes that each of some steps used up."""
    flat = [gradient_pass for step_passes in passes for gradient_pass in step_passes]
    ratios, uneven = np.full(len(flat), np.nan), np.zeros(len(flat), bool)
    for group in _same_entries(flat):
        ratios[group], uneven[group] = _ratios([flat[i] for i in group], follower.eps)
    factors, off = ratios.tolist(), uneven.tolist()
    audited, begin = [], 0
    for step, step_passes in zip(steps, passes, strict=True):
        end = begin + len(step_passes)
        for i, gradient_pass in enumerate(step_passes, begin):
            if off[i]:
                mark("changed-unevenly", follower.name, UNEVEN, step)
            if gradient_pass.left_over:
                mark("not-a-product", follower.name, NO_PRODUCT, step)
        marked = any(off[begin:end]) or any(gradient_pass.left_over for gradient_pass in step_passes)
        audited.append(_step_factors(factors[begin:end], marked))
        begin = end
    return audited


def _step_factors(ratios: list[float], marked: bool) -> GradientFactors:
    """The factor of each pass until the step, from the ratios of one pass to the next."""
    if not ratios:
        return GradientFactors(1.0, [], marked)
    factors = [1.0]
    for ratio in reversed(ratios[:-1]):
        factors.append(factors[-1] if np.isnan(ratio) else factors[-1] * ratio)
    return GradientFactors(None if np.isnan(ratios[-1]) else ratios[-1], factors[::-1], marked)


def scale_of(follower: GradientFollower) -> float:
    """The factor by which the gradient was multiplied since its last pass; 1 where it cannot be measured."""
    last = follower.passes[-1]
    if last.later is None or last.later == last.after:
        return 1.0
    ratios, _ = _ratios([last], follower.eps)
    return 1.0 if np.isnan(ratios[0]) else float(ratios[0])


def _same_entries(passes: Sequence[PassGradient]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, gradient_pass in enumerate(passes):
        if gradient_pass.later is not None:
            groups.setdefault(id(gradient_pass.watched), []).append(i)
    return list(groups.values())


def _ratios(passes: Sequence[PassGradient], eps: float) -> tuple[Float[np.ndarray, " p"], Bool[np.ndarray, " p"]]:
    """The factor of the gradient after each pass (NaN: cannot be measured), and whether entries have different ones."""
    ratios, uneven = np.ones(len(passes)), np.zeros(len(passes), bool)
    watched = passes[0].watched
    changed = [i for i, entries in enumerate(passes) if entries.later != entries.after or watched.zero(entries.after)]
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


# ------------------------------------------------------------------------------------------- probes of whole gradients


def probed(follower: GradientFollower, passes: Sequence[PassGradient], factors: Sequence[float]) -> ProbedSlots:
    """The probe of what the slots of some passes put into a gradient, each pass with its factor."""
    numbers, power, rows, eps = None, 0.0, 0, follower.eps
    for gradient_pass, factor in zip(passes, factors, strict=True):
        for part, slots in zip(gradient_pass.probed, gradient_pass.slots, strict=True):
            part = part.cpu() if factor == 1.0 else part.cpu() * factor
            numbers = part if numbers is None else numbers + part
            power += factor**2 * slots.power(follower.name)
            rows += slots.end - slots.begin
            eps = max(eps, slots.eps)
    return ProbedSlots(follower.probe.nothing() if numbers is None else numbers, power, rows, eps)


def not_products(
    sums: Sequence[ProbedSlots], scales: Sequence[float], gradients: Sequence[Tensor]
) -> Bool[np.ndarray, " s"]:
    """The steps in which the probe of a gradient differs from that of its slots by more than rounding explains.

    The rounding error of a sum of m products grows like √m; faster where large sums cancel, as with rows in an unlucky
    order.
    """
    rows, eps, power = (
        np.array([getattr(probed_slots, name) for probed_slots in sums]) for name in ("rows", "eps", "power")
    )
    product = (
        torch.stack([probed_slots.numbers for probed_slots in sums])
        * torch.tensor(scales, dtype=sums[0].numbers.dtype)[:, None]
    )
    off = torch.stack([gradient.cpu() for gradient in gradients]).sub_(product).norm(dim=1).double().numpy()
    size = np.abs(scales) * np.sqrt(power) + product.norm(dim=1).double().numpy()
    return ~(off <= eps * np.maximum(8 + 2.4 * np.sqrt(rows), 0.08 * rows) * size + 1e-30)
