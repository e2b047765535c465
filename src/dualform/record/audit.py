"""What the watched entries of the gradients say, found out for many steps at once.

Between its backward pass and the step a gradient may only have changed by one factor, and what a pass added must be
the product of the slots that were copied. What is neither is marked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from .gradients import Follower, Pass, Product

UNEVEN = (
    "its gradient was changed between backward and step, and not by one common factor (clip_grad_value_, noise, "
    "centralisation, a mask?): the memory explains only the common factor"
)
NO_PRODUCT = (
    "its gradient is not the sum of the recorded errors and inputs (a penalty on the weights in the loss, functional "
    "use of the weight, a hook that changes gradients, or a gradient left over from before?): the memory misses the "
    "difference"
)

Mark = Callable[[str, str, str, int], None]


@dataclass(slots=True)
class Found:
    """A parameter in a step: the scale of its last pass (None: not known), and of each pass relative to that."""

    scale: float | None
    factors: list[float]


def audit(follower: Follower, steps: Sequence[int], passes: Sequence[Sequence[Pass]], mark: Mark) -> list[Found]:
    """Look at the passes of a parameter that each of some steps used up."""
    flat = [each for some in passes for each in some]
    at = [step for step, some in zip(steps, passes, strict=True) for _ in some]
    ratios = np.full(len(flat), np.nan)
    uneven, wrong = np.zeros(len(flat), bool), np.zeros(len(flat), bool)
    for group in _same_entries(flat):
        ratios[group], uneven[group] = _ratios([flat[i] for i in group], follower.eps)
    if checked := [i for i, each in enumerate(flat) if each.terms is not None or each.product is not None]:
        wrong[checked] = [_is_wrong(flat[i], follower.eps) for i in checked]
    for i, each in enumerate(flat):
        if uneven[i]:
            mark("changed-unevenly", follower.name, UNEVEN, at[i])
        if wrong[i] or each.left_over:
            mark("not-a-product", follower.name, NO_PRODUCT, at[i])
    ends = np.cumsum([len(some) for some in passes])
    return [_found(ratios[end - len(some) : end].tolist()) for end, some in zip(ends, passes, strict=True)]


def _found(ratios: list[float]) -> Found:
    """What one pass after the other was multiplied with until the step."""
    if not ratios:
        return Found(1.0, [])
    factors = [1.0]
    for ratio in reversed(ratios[:-1]):
        factors.append(factors[-1] if np.isnan(ratio) else factors[-1] * ratio)
    return Found(None if np.isnan(ratios[-1]) else ratios[-1], factors[::-1])


def scale_of(follower: Follower) -> float:
    """By what the gradient was multiplied since its last pass; 1 where that cannot be seen."""
    last = follower.passes[-1]
    if last.later is None or last.later == last.after:
        return 1.0
    ratios, _ = _ratios([last], follower.eps)
    return 1.0 if np.isnan(ratios[0]) else float(ratios[0])


def _same_entries(passes: Sequence[Pass]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, each in enumerate(passes):
        if each.later is not None:
            groups.setdefault(id(each.entries), []).append(i)
    return list(groups.values())


def _ratios(passes: Sequence[Pass], eps: float) -> tuple[Float[np.ndarray, " p"], Bool[np.ndarray, " p"]]:
    """By what the gradient was multiplied after each pass (NaN: cannot be seen); whether by more than one number."""
    seen = passes[0].entries.seen
    after, later = seen.values([each.after for each in passes]), seen.values([each.later or b"" for each in passes])
    power = np.einsum("pk,pk->p", after, after)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.einsum("pk,pk->p", later, after) / power
        off = np.abs(later - ratio[:, None] * after).max(1)
    return np.where(power > 0, ratio, np.nan), (power > 0) & (off > 64 * eps * np.abs(later).max(1))


def _is_wrong(added: Pass, eps: float) -> bool:
    """Whether what a pass added is not the product of its slots, beyond what rounding explains."""
    seen, (total, size, rows, finest) = added.entries.seen, added.product or product_of(added)
    after = seen.values([added.after])[0]
    size = size + np.abs(after)
    if added.before is not None:
        before = seen.values([added.before])[0]
        total, size = total + before, size + np.abs(before)
    return bool((np.abs(after - total) > (16 + 2 * rows**0.5) * max(eps, finest) * size + 1e-30).any())


def product_of(added: Pass) -> Product:
    """What the slots of a pass add to the watched entries."""
    total, size, rows = np.zeros(len(added.entries.seen)), np.zeros(len(added.entries.seen)), 0
    for error, key, known in added.terms or ():
        e, s = error.double().cpu().numpy(), known.double().cpu().numpy()
        x = np.ones((1, 1)) if key is None else key.double().cpu().numpy()
        total += (e * x).sum(0)
        size += (s * np.abs(x)).sum(0)
        rows += len(e)
    return Product(total, size, rows, max([0.0, *(slots.eps for slots in added.slots)]))
