"""A trial: runs the shadow of a module on the arguments of a call, and captures the rows of its recorded layers."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..layers import ErrorPoint, ModuleCall
from ..plan import RecordedModule

CallPlace = tuple[str, int, int]
"""The place of some rows: the module, the number of its call, the number of the map inside that call."""


class TrialRows(NamedTuple):
    """Inputs and errors of one map in one call, with the leading axes of the call. Without an error none arrived."""

    key: Tensor
    error: Tensor | None


class TrialCall:
    """One forward pass of a shadow, and any number of backward passes."""

    def __init__(
        self, module: nn.Module, recorded: Sequence[tuple[nn.Module, RecordedModule]], args: tuple, kwargs: dict
    ) -> None:
        self._calls: list[tuple[str, ModuleCall, list[Tensor | None]]] = []
        for shadow, original in recorded:
            original.kind.attach(shadow, partial(self._see, original.uses[0].info.name))
        self._leaves = [p for p in module.parameters() if p.requires_grad]
        args, kwargs = pytree.tree_map(_detached, (args, kwargs))
        outputs = pytree.tree_leaves(_as_dict(module(*args, **kwargs)))
        self.outputs = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point()]
        self._forward = len(self._calls)

    def _see(self, name: str, call: ModuleCall, points: Sequence[ErrorPoint]) -> None:
        errors: list[Tensor | None] = [None] * len(points)
        self._calls.append((name, call, errors))
        for i, point in enumerate(points):
            point.node.register_prehook(partial(_arrive, errors, i, point.number))

    def rows(self, weights: Sequence[Tensor | None]) -> dict[CallPlace, TrialRows]:
        """Inputs and errors of all calls, where the loss is the weighted sum of the entries of the outputs."""
        del self._calls[self._forward :]  # activation checkpointing calls its layers again in every backward pass
        for _, _, errors in self._calls:
            errors[:] = [None] * len(errors)
        weighted = [(out, weight) for out, weight in zip(self.outputs, weights, strict=True) if weight is not None]
        torch.autograd.backward(
            [out for out, _ in weighted],
            [weight.to(out) for out, weight in weighted],
            retain_graph=True,
            inputs=self._leaves,  # gradients must not reach tensors that the user's code takes from outside the shadow
        )
        rows: dict[CallPlace, TrialRows] = {}
        numbers: Counter[str] = Counter()
        for name, call, errors in self._calls:
            for i, (_, key, error) in enumerate(call.rows(errors) if any(e is not None for e in errors) else ()):
                error = None if error is None else error.reshape(*key.shape[:-1], -1)
                rows[name, numbers[name], i] = TrialRows(key, error)
            numbers[name] += 1
        return rows

    def keys(self) -> dict[CallPlace, Tensor]:
        """The inputs of all calls of the forward pass."""
        keys: dict[CallPlace, Tensor] = {}
        numbers: Counter[str] = Counter()
        for name, call, _ in self._calls:
            for i, key in enumerate(call.inputs()):
                keys[name, numbers[name], i] = key.rows
            numbers[name] += 1
        return keys


def _arrive(errors: list[Tensor | None], place: int, number: int, grads: tuple[Tensor | None, ...]) -> None:
    grad, before = grads[number], errors[place]
    if grad is not None:
        errors[place] = grad.detach().clone() if before is None else before + grad.detach()


def _detached(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _as_dict(outputs: Any) -> Any:
    """Outputs in a container that pytree traverses: any mapping becomes a dict."""
    return dict(outputs) if isinstance(outputs, Mapping) else outputs


@contextmanager
def without_trace(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Restore the state of random numbers afterwards, and these buffers if the code inside changed them.

    Tensors saved for the backward pass get hooks that do nothing, so that activation checkpointing around the call does
    not count them.
    """
    state, numbers, versions = random.getstate(), np.random.get_state(), [t._version for t in buffers]
    copies = [t.detach().clone() for t in buffers]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        stack.enter_context(torch.enable_grad())
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numbers)
            for tensor, version, copy in zip(buffers, versions, copies, strict=True):
                if tensor._version != version:
                    with torch.no_grad():
                        tensor.copy_(copy)
