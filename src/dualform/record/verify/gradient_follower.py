r"""Follows a gradient from its backward passes to the step.

A memory explains a step if the gradient that the optimiser uses is :math:`\kappa_s \sum E^\top X` with one scalar κ
(clipping, loss scaling) over the recorded slots. κ is measured at a few entries where the gradient is large (at all
entries of a small one); whether all other entries follow it, by a probe of the whole gradient (``gradient_probe.py``).
While training runs, entries and probes are only copied; they are audited later, for many steps at once
(``gradient_audit.py``).
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
"""Random entries among which the largest are chosen; how many are chosen, and how many neighbours of each are read."""

SPREAD = 16
"""Places that are watched in a gradient if several processes must agree on them before the first gradient."""

TOGETHER = 64
"""Numbers of a probe that several processes add up."""

PATIENCE = 64
"""Passes that are kept for a parameter that no optimiser has (it may be added to one later)."""


class ProbedSlots(NamedTuple):
    """The probe of what slots put into a gradient, and what its rounding error depends on: ``power`` is about the sum
    of |x|² |e|² over all ``rows``, ``eps`` the coarsest rounding of these.
    """

    numbers: Float[Tensor, " p"]
    power: float
    rows: int
    eps: float


@dataclass(slots=True)
class PassGradient:
    """What one backward pass added to a gradient: its slots and their probes; the watched entries right ``after`` the
    pass, and ``later``, before the next pass or the step.
    """

    watched: EntrySample
    after: bytes
    slots: list[CallSlots]
    probed: list[Tensor]
    """The probe of the slots of each call."""
    left_over: bool
    """Whether it was added to a gradient that a step had used before."""
    version: int
    """How often the gradient had been changed when the pass was over."""
    later: bytes | None = None


def gradient_eps(passes: Sequence[PassGradient]) -> float:
    """The machine precision in which a gradient was computed: that of the inputs and errors it is the product of."""
    return max((slots.eps for gradient_pass in passes for slots in gradient_pass.slots), default=0.0)


@dataclass(slots=True)
class OpenPass:
    """A backward pass that has reached a parameter and is not over yet."""

    grad: Tensor | None
    version: int
    now: bytes | None
    slots: list[CallSlots] = field(default_factory=list)
    probed: list[Tensor] = field(default_factory=list)
    left_over: bool = False
    """Whether the gradient was not zero before, though no known pass has added to it."""


def follow_gradients(plan: RecordingPlan, alone: bool, has_moved: bool) -> dict[str, "GradientFollower"]:
    """A follower for each parameter of the recorded layers. ``has_moved`` where the memory holds steps already."""
    followers = {name: GradientFollower(name, plan.parameter(name), plan.layers, alone) for name in plan.followed}
    for follower in followers.values():
        follower.moved = has_moved
    return followers


class GradientFollower:
    """Follows the gradient of one parameter from pass to pass until the step; ``alone``, or with other processes."""

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
        """Whether its slots have to explain a step already."""
        self._blind = 0

    def begin(self) -> OpenPass:
        """A backward pass is about to reach this parameter: read its gradient."""
        grad = self.parameter.grad
        if grad is None:
            self.passes = []
            return OpenPass(None, 0, None)
        now = self.read(grad) if self.watched is not None else None
        if self.passes and self._was_zeroed(grad, now):
            self.passes = []
        unexplained = (
            now is None and not self.passes and bool(grad.any())
        )  # left by a backward pass that was broken off?
        return OpenPass(grad, grad._version, now, left_over=unexplained)

    def has_more(self, opened: OpenPass) -> bool:
        """Whether the backward pass, which is over, has added to the gradient."""
        grad = self.parameter.grad
        return grad is not None and not (grad is opened.grad and grad._version == opened.version)

    def end(self, opened: OpenPass, waits: bool) -> None:
        """Keep what the pass added. ``waits`` if no optimiser has the parameter."""
        grad = self.parameter.grad
        assert grad is not None
        before = opened.now
        watched = self.watched or (self._choose(grad) if self.alone else self._spread())
        after = watched.of(grad)
        if watched.zero(after):
            watched, before = self._choose(grad), None  # choose entries where the gradient is not zero
            after = watched.of(grad)
        not_zero = before is not None and not watched.zero(before)
        left_over = opened.left_over or (not_zero and not self.passes)
        self.passes.append(PassGradient(watched, after, opened.slots, opened.probed, left_over, grad._version))
        if waits and len(self.passes) > PATIENCE:
            self.passes = []

    def read(self, grad: Tensor) -> bytes:
        """The watched entries as they are now. If they have become zero, the passes so far are dropped."""
        assert self.watched is not None
        now = self.watched.of(grad)
        if self.passes:
            if self.watched.zero(now) and not self.watched.zero(self.passes[-1].after):
                self.passes = []
            else:
                self.passes[-1].later = now
        return now

    def _was_zeroed(self, grad: Tensor, now: bytes | None) -> bool:
        """Whether a gradient was zeroed whose watched entries do not show it."""
        if now is not None and self.watched is not None and not self.watched.zero(now):
            return False
        return grad._version != self.passes[-1].version and not bool(grad.any())

    def watch_at(self, places: tuple[tuple[int, ...], int] | None) -> None:
        """Watch these entries from the next pass on: the beginnings of runs of neighbours, and their length."""
        if places is not None and not self.passes:
            self._watch(*places)

    def watch_elsewhere(self) -> None:
        """Watch other entries from the next pass on."""
        if not self.passes:
            self.watched = None

    def _choose(self, grad: Tensor) -> EntrySample:
        """Watch all entries of a small gradient, else those around the largest of some random ones (of all, if these
        are zero).
        """
        flat = grad.detach().reshape(-1)
        size = flat.numel()
        if size <= CANDIDATES and self.alone:
            return self._watch([0], size)
        candidates = (
            torch.from_numpy(self.random.integers(size, size=CANDIDATES)) if size > CANDIDATES else torch.arange(size)
        )
        candidates = candidates.to(flat.device)
        values = flat[candidates].abs()
        if not bool(values.any()):
            self._blind += 1
            if self._blind & (self._blind - 1) == 0:  # the 1st, 2nd, 4th, 8th … time: a dead layer should cost nothing
                candidates, values = torch.arange(size, device=flat.device), flat.abs()
        best = candidates[values.topk(min(SIDE, len(candidates))).indices]
        width = min(SIDE, size)  # neighbours: they lie in one line of the cache
        begins = (best - best % SIDE).clamp(max=size - width).unique().tolist()
        return self._watch(begins, width)

    def _spread(self) -> EntrySample:
        """Watch the same entries as the other processes, whatever their gradients are."""
        size = self.parameter.numel()
        width = min(SIDE, size)
        return self._watch(np.unique(self.random.integers(size - width + 1, size=SPREAD)).tolist(), width)

    def _watch(self, begins: Sequence[int], width: int) -> EntrySample:
        self.watched = EntrySample(begins, width, self.parameter.dtype)
        return self.watched
