r"""What happens to a gradient between backward and step, read off a few of its entries.

A memory explains a step if the gradient that the optimiser uses is :math:`\kappa_s \sum E^\top X` with one scalar κ
(clipping, loss scaling) over the recorded slots. So for each parameter a few entries are watched where its gradient
is large. While training runs they are only read; what they say is found out later, for many steps at once
(``audit.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dualform.memory import Glimpse, places
from dualform.types import LayerInfo

from .stage import Slots

CANDIDATES, SIDE = 1024, 4

SPREAD = 16
"""Places that are watched in a gradient where several processes must agree on them before they have seen any."""

PATIENCE = 64
"""Passes that are held for a parameter that no optimiser has (it may be given to one later)."""


@dataclass(frozen=True, eq=False)
class Entries:
    """The watched entries of a parameter, counted over all of it, and where they lie."""

    parameter: str
    which: Int[np.ndarray, " k"]
    seen: Glimpse
    _places: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def terms(self, layer: LayerInfo, key: Tensor, error: Tensor) -> "Terms":
        """What the rows of a call add to them: the factors."""
        if layer.name not in self._places:
            self._places[layer.name] = self._place(layer, error.device)
        rows, columns = self._places[layer.name]
        e = error.index_select(1, rows)
        # an error behind a saturated gate holds 1 − y, of which rounding leaves little: it is known beside the others
        known = error.abs().amax(1, keepdim=True) if layer.kind == "recurrent" else e.abs()
        if columns is None:
            return Terms(e, None, known)
        return Terms(e, key == columns if layer.indexed else key.index_select(1, columns), known)

    def _place(self, layer: LayerInfo, device: torch.device) -> tuple[Tensor, Tensor | None]:
        if self.parameter in layer.biases:
            return torch.from_numpy(self.which).to(device), None
        rows, columns = places(layer, self.parameter, self.which)
        return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)


class Terms(NamedTuple):
    """For each row of a call the watched columns of its error and of its input (of a bias: none), side by side."""

    error: Tensor
    key: Tensor | None
    size: Tensor
    """Beside what an error is known: rounding leaves a share of it."""


class Product(NamedTuple):
    """What the slots of a pass add to the watched entries, the size of all terms, and how exact these are."""

    total: Float[np.ndarray, " k"]
    size: Float[np.ndarray, " k"]
    rows: int
    eps: float


@dataclass(slots=True)
class Pass:
    """What one backward pass added to a gradient: the watched entries before, right after, and when more happened."""

    entries: Entries
    before: bytes | None
    after: bytes
    slots: list[Slots]
    terms: list[Terms] | None
    """There where the pass is to be checked."""
    left_over: bool
    """Whether it was added to a gradient that a step had used already."""
    version: int
    """How often the gradient had been changed when the pass was over."""
    later: bytes | None = None
    product: "Product | None" = None
    """There where it was found already."""


def gradient_eps(passes: Sequence[Pass]) -> float:
    """The machine precision in which a gradient was computed: that of the inputs and errors it is the product of."""
    return max((slots.eps for added in passes for slots in added.slots), default=0.0)


@dataclass(slots=True)
class Opened:
    """A backward pass that has reached a parameter and is not over yet."""

    grad: Tensor | None
    version: int
    now: bytes | None
    passes: int
    checked: bool
    slots: list[Slots] = field(default_factory=list)
    terms: list[Terms] = field(default_factory=list)
    calls: list[tuple[LayerInfo, Tensor, Tensor]] = field(default_factory=list)
    """Inputs and errors themselves, as long as it is not known where to look."""


class Follower:
    """Follows the gradient of one parameter from pass to pass until the step; ``alone``, or as others do it."""

    def __init__(self, name: str, parameter: nn.Parameter, alone: bool = True) -> None:
        self.name, self.parameter, self.alone = name, parameter, alone
        self.eps = torch.finfo(parameter.dtype).eps
        self.random = np.random.default_rng(parameter.numel())
        self.entries: Entries | None = None
        self.passes: list[Pass] = []
        self._blind = 0

    def begin(self, checked: bool) -> Opened:
        """A backward pass is about to reach this parameter: what is in its gradient by now?"""
        grad = self.parameter.grad
        if grad is None:
            self.passes = []
            return Opened(None, 0, None, 0, checked)
        now = self.read(grad) if self.entries is not None else None
        if self.passes and self._was_zeroed(grad, now):
            self.passes = []
        return Opened(grad, grad._version, now, len(self.passes), checked)

    def call(self, opened: Opened, slots: Slots, key: Tensor, error: Tensor) -> None:
        """A call of the layer is a part of the pass."""
        opened.slots.append(slots)
        if opened.checked and self.entries is not None:
            opened.terms.append(self.entries.terms(slots.layer, key, error))
        elif opened.checked:
            opened.calls.append((slots.layer, key, error))

    def has_more(self, opened: Opened) -> bool:
        """The backward pass is over: did it add anything here?"""
        grad = self.parameter.grad
        return grad is not None and not (grad is opened.grad and grad._version == opened.version)

    def end(self, opened: Opened, waits: bool) -> None:
        """Remember what the pass added. ``waits`` where no optimiser has the parameter."""
        grad = self.parameter.grad
        assert grad is not None
        before, checked = opened.now, opened.checked and len(self.passes) == opened.passes  # no other pass within it
        entries = self.entries or (self._choose(grad) if self.alone else self._spread())
        after = entries.seen.of(grad)
        if not opened.calls and entries.seen.zero(after):
            entries, before, checked = self._choose(grad), None, False  # look where the gradient is not zero
            after = entries.seen.of(grad)
        terms = opened.terms + [entries.terms(*call) for call in opened.calls] if checked else None
        left_over = not self.passes and before is not None and not entries.seen.zero(before)
        self.passes.append(Pass(entries, before, after, opened.slots, terms, left_over, grad._version))
        if waits and len(self.passes) > PATIENCE:
            self.passes = []

    def read(self, grad: Tensor) -> bytes:
        """The watched entries as they are now. Where they became zero, the passes so far are gone."""
        assert self.entries is not None
        seen = self.entries.seen
        now = seen.of(grad)
        if self.passes:
            if seen.zero(now) and not seen.zero(self.passes[-1].after):
                self.passes = []
            else:
                self.passes[-1].later = now
        return now

    def _was_zeroed(self, grad: Tensor, now: bytes | None) -> bool:
        """Whether somebody zeroed a gradient in which there was nothing to see."""
        if now is not None and self.entries is not None and not self.entries.seen.zero(now):
            return False
        return grad._version != self.passes[-1].version and not bool(grad.any())

    def look_at(self, where: tuple[tuple[int, ...], int] | None) -> None:
        """Watch these entries from the next pass on: runs of neighbours, and how long they are."""
        if where is not None and not self.passes:
            self._watch(*where)

    def look_elsewhere(self) -> None:
        """Watch other entries from the next pass on."""
        if not self.passes:
            self.entries = None

    def _choose(self, grad: Tensor) -> Entries:
        """Watch the entries around the largest of some random ones, or of all where those are zero."""
        flat = grad.detach().reshape(-1)
        size = flat.numel()
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

    def _spread(self) -> Entries:
        """Watch the same entries that other processes watch, whatever their gradients are."""
        size = self.parameter.numel()
        width = min(SIDE, size)
        return self._watch(np.unique(self.random.integers(size - width + 1, size=SPREAD)).tolist(), width)

    def _watch(self, begins: Sequence[int], width: int) -> Entries:
        seen = Glimpse(begins, width, self.parameter.dtype)
        self.entries = Entries(self.name, seen.index.numpy(), seen)
        return self.entries
