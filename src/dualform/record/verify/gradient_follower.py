r"""What happens to a gradient between backward and step.

A memory explains a step if the gradient that the optimiser uses is :math:`\kappa_s \sum E^\top X` with one scalar κ
(clipping, loss scaling) over the recorded slots. κ is read off a few entries where the gradient is large (all of a
small one); whether the rest of the gradient follows it, off a probe of the whole (``gradient_probe.py``). While
training runs both are only taken; what they say is found out later, for many steps at once (``audit.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.store import EntrySample
from dualform.types import LayerInfo

from ..plan import RecordingPlan
from ..slots import CallSlots
from .gradient_probe import GradientProbe

CANDIDATES, SIDE = 1024, 4

SPREAD = 16
"""Places that are watched in a gradient where several processes must agree on them before they have seen any."""

TOGETHER = 64
"""Numbers of a probe that several processes add up."""

PATIENCE = 64
"""Passes that are held for a parameter that no optimiser has (it may be given to one later)."""


class ProbedSlots(NamedTuple):
    """What slots put into a gradient, seen through its probe, and what that is known up to: ``power`` is about the sum
    of |x|² |e|² over all ``rows``, ``eps`` the coarsest rounding of these.
    """

    numbers: Float[Tensor, " p"]
    power: float
    rows: int
    eps: float


@dataclass(slots=True)
class PassGradient:
    """What one backward pass added to a gradient: the watched entries right after, and when more happened; the slots,
    and what they put into it.
    """

    watched: EntrySample
    after: bytes
    slots: list[CallSlots]
    probed: list[Tensor]
    """For each call its part of the probe."""
    left_over: bool
    """Whether it was added to a gradient that a step had used already."""
    version: int
    """How often the gradient had been changed when the pass was over."""
    later: bytes | None = None


def gradient_eps(passes: Sequence[PassGradient]) -> float:
    """The machine precision in which a gradient was computed: that of the inputs and errors it is the product of."""
    return max((slots.eps for added in passes for slots in added.slots), default=0.0)


@dataclass(slots=True)
class OpenPass:
    """A backward pass that has reached a parameter and is not over yet."""

    grad: Tensor | None
    version: int
    now: bytes | None
    slots: list[CallSlots] = field(default_factory=list)
    probed: list[Tensor] = field(default_factory=list)
    left_over: bool = False
    """Whether something was there already, though no pass is known that left it."""


def follow_gradients(plan: RecordingPlan, alone: bool, has_moved: bool) -> dict[str, "GradientFollower"]:
    """A follower for each parameter of the recorded layers. ``has_moved`` where the memory holds steps already."""
    followers = {name: GradientFollower(name, plan.parameter(name), plan.layers, alone) for name in plan.followed}
    for follower in followers.values():
        follower.moved = has_moved
    return followers


class GradientFollower:
    """Follows the gradient of one parameter from pass to pass until the step; ``alone``, or as others do it."""

    def __init__(self, name: str, parameter: nn.Parameter, layers: Sequence[LayerInfo], alone: bool = True) -> None:
        self.name, self.parameter, self.alone = name, parameter, alone
        self.eps = torch.finfo(parameter.dtype).eps
        self.probe = (
            GradientProbe(name, parameter, layers)
            if alone
            else GradientProbe(name, parameter, layers, numbers=TOGETHER)
        )
        self.random = np.random.default_rng(parameter.numel())
        self.watched: EntrySample | None = None
        self.passes: list[PassGradient] = []
        self.moved = False
        """Whether a step was taken that its slots have to explain."""
        self._blind = 0

    def begin(self) -> OpenPass:
        """A backward pass is about to reach this parameter: what is in its gradient by now?"""
        grad = self.parameter.grad
        if grad is None:
            self.passes = []
            return OpenPass(None, 0, None)
        now = self.read(grad) if self.watched is not None else None
        if self.passes and self._was_zeroed(grad, now):
            self.passes = []
        unseen = now is None and not self.passes and bool(grad.any())  # a backward pass that was broken off?
        return OpenPass(grad, grad._version, now, left_over=unseen)

    def has_more(self, opened: OpenPass) -> bool:
        """The backward pass is over: did it add anything here?"""
        grad = self.parameter.grad
        return grad is not None and not (grad is opened.grad and grad._version == opened.version)

    def end(self, opened: OpenPass, waits: bool) -> None:
        """Remember what the pass added. ``waits`` where no optimiser has the parameter."""
        grad = self.parameter.grad
        assert grad is not None
        before = opened.now
        watched = self.watched or (self._choose(grad) if self.alone else self._spread())
        after = watched.of(grad)
        if watched.zero(after):
            watched, before = self._choose(grad), None  # look where the gradient is not zero
            after = watched.of(grad)
        seen = before is not None and not watched.zero(before)
        left_over = opened.left_over or (seen and not self.passes)
        self.passes.append(PassGradient(watched, after, opened.slots, opened.probed, left_over, grad._version))
        if waits and len(self.passes) > PATIENCE:
            self.passes = []

    def read(self, grad: Tensor) -> bytes:
        """The watched entries as they are now. Where they became zero, the passes so far are gone."""
        assert self.watched is not None
        now = self.watched.of(grad)
        if self.passes:
            if self.watched.zero(now) and not self.watched.zero(self.passes[-1].after):
                self.passes = []
            else:
                self.passes[-1].later = now
        return now

    def _was_zeroed(self, grad: Tensor, now: bytes | None) -> bool:
        """Whether somebody zeroed a gradient in which there was nothing to see."""
        if now is not None and self.watched is not None and not self.watched.zero(now):
            return False
        return grad._version != self.passes[-1].version and not bool(grad.any())

    def look_at(self, where: tuple[tuple[int, ...], int] | None) -> None:
        """Watch these entries from the next pass on: runs of neighbours, and how long they are."""
        if where is not None and not self.passes:
            self._watch(*where)

    def look_elsewhere(self) -> None:
        """Watch other entries from the next pass on."""
        if not self.passes:
            self.watched = None

    def _choose(self, grad: Tensor) -> EntrySample:
        """Watch the entries around the largest of some random ones, or of all where those are zero; all of a few."""
        flat = grad.detach().reshape(-1)
        size = flat.numel()
        if size <= CANDIDATES and self.alone:
            return self._watch([0], size)
        some = (
            torch.from_numpy(self.random.integers(size, size=CANDIDATES)) if size > CANDIDATES else torch.arange(size)
        )
        some = some.to(flat.device)
        values = flat[some].abs()
        if not bool(values.any()):
            self._blind += 1
            if self._blind & (self._blind - 1) == 0:  # the 1st, 2nd, 4th, 8th … time: a dead layer should cost nothing
                some, values = torch.arange(size, device=flat.device), flat.abs()
        best = some[values.topk(min(SIDE, len(some))).indices]
        width = min(SIDE, size)  # neighbours: they lie in one line of the cache
        begins = (best - best % SIDE).clamp(max=size - width).unique().tolist()
        return self._watch(begins, width)

    def _spread(self) -> EntrySample:
        """Watch the same entries that other processes watch, whatever their gradients are."""
        size = self.parameter.numel()
        width = min(SIDE, size)
        return self._watch(np.unique(self.random.integers(size - width + 1, size=SPREAD)).tolist(), width)

    def _watch(self, begins: Sequence[int], width: int) -> EntrySample:
        self.watched = EntrySample(begins, width, self.parameter.dtype)
        return self.watched
