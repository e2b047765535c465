r"""What happens to a gradient between backward and step, read off a few of its entries.

A memory explains a step if the gradient that the optimiser uses is :math:`\kappa_s \sum E^\top X` with one scalar κ
(clipping, loss scaling) over the recorded slots. So for each parameter a few rows and columns are watched where its
gradient is large: what a backward pass adds there must equal the same entries of EᵀX, and until the step they may only
change by one common factor. While training runs the entries are only read; they are compared later, many at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CANDIDATES, SIDE = 1024, 4

UNEVEN = (
    "its gradient was changed between backward and step, and not by one common factor (clip_grad_value_, noise, "
    "centralisation, a mask?): the memory explains only the common factor"
)
NO_PRODUCT = (
    "its gradient is not the sum of the recorded errors and inputs (a penalty on the weights in the loss, functional "
    "use of the weight, a hook that changes gradients, or a gradient left over from before?): the memory misses the "
    "difference"
)


@dataclass(frozen=True)
class Entries:
    """The watched entries of a parameter: a few rows and columns (of a bias: rows), and where they lie."""

    rows: np.ndarray
    columns: np.ndarray | None
    flat: np.ndarray

    def of(self, tensor: Tensor) -> np.ndarray:
        """Their values in a tensor."""
        tensor = tensor.detach()
        if tensor.dtype != torch.bfloat16 and tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor.numpy().reshape(-1).take(self.flat)
        return tensor.reshape(-1)[torch.from_numpy(self.flat).to(tensor.device)].double().cpu().numpy()


@dataclass(slots=True)
class Pass:
    """What one backward pass added to a gradient: the watched entries before, right after, and when more happened."""

    entries: Entries
    before: np.ndarray | None
    after: np.ndarray
    slots: Sequence[Any]
    later: np.ndarray | None = None
    factor: float = field(default=1.0)


class Follower:
    """Follows the gradient of one parameter from pass to pass until the step."""

    def __init__(self, name: str, parameter: nn.Parameter, mark: Callable[[str, str, str], None]) -> None:
        self.name, self.parameter, self.mark = name, parameter, mark
        self.eps = torch.finfo(parameter.dtype).eps
        self.random = np.random.default_rng(parameter.numel())
        self.entries: Entries | None = None
        self.passes: list[Pass] = []
        self._seen: tuple[int, int] | None = None
        self._now: np.ndarray | None = None

    # -------------------------------------------------------------------------------- while training runs

    def begin_pass(self) -> None:
        """A backward pass is about to reach this parameter: what is in its gradient by now?"""
        grad = self.parameter.grad
        if grad is None:
            self.passes, self._seen, self._now = [], None, None
            return
        self._seen = id(grad), grad._version
        self._now = self.read(grad) if self.entries is not None else None

    def end_pass(self, slots: Sequence[Any]) -> bool:
        """The backward pass is over. Whether it added anything here; if so, it is made of these slots."""
        grad = self.parameter.grad
        if grad is None or self._seen == (id(grad), grad._version):
            return False
        if self.entries is None:
            self.choose(grad)
        assert self.entries is not None
        after = self.entries.of(grad)
        if not after.any() and not self.passes and (self._now is None or not self._now.any()):
            self.choose(grad)  # nothing to see there: look where the gradient is not zero
            after, self._now = self.entries.of(grad), None
        self.passes.append(Pass(self.entries, self._now, after, slots))
        return True

    def read(self, grad: Tensor) -> np.ndarray:
        """The watched entries as they are now. Where they became zero, the passes so far are gone."""
        assert self.entries is not None
        now = self.entries.of(grad)
        if self.passes:
            if not now.any() and self.passes[-1].after.any():
                self.passes = []
            else:
                self.passes[-1].later = now
        return now

    def choose(self, grad: Tensor) -> None:
        """Watch other entries: around the largest of some random ones, or of all where those are zero."""
        size = grad.numel()
        some = self.random.integers(size, size=CANDIDATES) if size > CANDIDATES else np.arange(size)
        values = np.abs(Entries(some, None, some).of(grad))
        if not values.any():
            some = grad.detach().abs().flatten().topk(min(SIDE, size)).indices.cpu().numpy()
            values = np.ones(len(some))
        best = some[np.argsort(values)[-SIDE:]]
        if grad.ndim == 1:
            self.entries = Entries(best, None, best)
            return
        width = grad.shape[-1]
        rows, columns = np.unique(best // width), np.unique(best % width)
        self.entries = Entries(rows, columns, (rows[:, None] * width + columns).ravel())

    # -------------------------------------------------------------------------------- later

    def resolve(self, passes: Sequence[Pass], unknown: float = 1.0) -> float | None:
        """Give each pass the factor by which it is in the gradient of the step; returns the last (None: not known).

        ``unknown`` stands for the last factor where it cannot be read.
        """
        last = self._ratio(passes[-1])
        factor = unknown if last is None else last
        passes[-1].factor = factor
        for each in reversed(passes[:-1]):
            ratio = self._ratio(each)
            factor *= 1.0 if ratio is None else ratio
            each.factor = factor
        return last

    def _ratio(self, added: Pass) -> float | None:
        after, later = added.after.astype(np.float64), added.later
        power = float(after @ after)
        if later is None or not power:
            return None
        later = later.astype(np.float64)
        ratio = float(later @ after) / power
        if np.abs(later - ratio * after).max() > 64 * self.eps * np.abs(later).max():
            self.mark("changed-unevenly", self.name, UNEVEN)
        return ratio

    def check(
        self, passes: Sequence[Pass], products: np.ndarray, sizes: np.ndarray, rows: np.ndarray, eps: float
    ) -> None:  # fmt: skip
        """See that what passes added are the given products, (pass, entry); ``sizes`` are those of their terms."""
        after = np.array([each.after for each in passes], np.float64)
        before = np.array(
            [np.zeros_like(each.after) if each.before is None else each.before for each in passes], np.float64
        )
        bound = (16 + 2 * rows[:, None] ** 0.5) * max(eps, self.eps) * (sizes + np.abs(before) + np.abs(after)) + 1e-30
        for _ in range(int(np.sum((np.abs(after - before - products) > bound).any(1) & np.isfinite(after).all(1)))):
            self.mark("not-a-product", self.name, NO_PRODUCT)
