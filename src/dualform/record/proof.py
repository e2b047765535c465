r"""The certificate, built up while training runs.

Of each recorded parameter a few dozen entries (some rows and columns of it) are carried from step to step by
the optimiser's own recurrence, fed with nothing but the slots *as they are stored*. Whenever a shard is complete they
are compared with the real weights, so every shard on disk comes with its certificate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.attend import Agreement, View, agreement, entries, initial_part
from dualform.memory import ParameterStep, Store

from .plan import Plan
from .stage import Slots, followed


class Used(NamedTuple):
    """Slots that a step used up, and what they count for in the gradients of weight and bias."""

    step: int
    slots: Slots
    factor: float
    bias_factor: float


Coefficients = Mapping[int, tuple[float, float]]
"""For a step what its gradient adds to a parameter, and to the optimiser's buffer of it."""


@dataclass(frozen=True)
class Entries:
    """Some rows and columns of a weight, or some rows of a bias."""

    rows: slice
    columns: slice | None

    def of(self, tensor: Tensor) -> Shaped[Tensor, "r c"]:
        """Those of a tensor."""
        tensor = tensor.detach()[self.rows].cpu()
        return tensor.unsqueeze(1) if self.columns is None else tensor[:, self.columns]


@dataclass
class State:
    """The followed entries of a parameter: at first, and by now (of the optimiser's buffer too) as slots give them."""

    entries: Entries
    first: Float[np.ndarray, "r c"]
    weight: Float[np.ndarray, "r c"]
    buffer: Float[np.ndarray, "r c"]
    moves: int


class Proof:
    """Follows all recorded parameters."""

    def __init__(self, plan: Plan, store: Store, step: int) -> None:
        self.plan = plan
        self.layers = {name: layer for layer in plan.layers for name in layer.parameters}
        self.states = {name: self._state(store, name, step) for name in plan.explained}

    def _state(self, store: Store, name: str, step: int) -> State:
        layer = self.layers[name]
        which = Entries(followed(layer.d_out), followed(layer.d_in) if name == layer.weight else None)
        first = which.of(store.initial(name)).double().numpy()
        if step:
            weight, buffer = (self._rebuilt(store, name, which, step, of) for of in ("weight", "buffer"))
            return State(which, first, weight, buffer, moves=int((store.schedule(name)[0] <= step).sum()))
        kept = store.initial_buffer(name)
        buffer = np.zeros_like(first) if kept is None else which.of(kept).double().numpy()
        return State(which, first, first.copy(), buffer, moves=0)

    def _rebuilt(self, store: Store, name: str, which: Entries, step: int, of: str) -> np.ndarray:
        total = which.of(initial_part(store, name, step, of)).numpy()
        for layer in store.manifest.layers:
            if name in layer.parameters:
                columns = None if which.columns is None else _numbers(which.columns)
                total = total + entries(store, layer, name, View(step), _numbers(which.rows), columns, of).numpy()
        return total

    def take(self, lines: Sequence[tuple[int, ParameterStep]], used: Sequence[Used]) -> None:
        """Go on by some steps: their lines, and the slots they used up."""
        moves: dict[str, list[tuple[int, ParameterStep]]] = {name: [] for name in self.states}
        for step, line in lines:
            if line.parameter in moves:
                moves[line.parameter].append((step, line))
        coefficients = {name: self._advance(self.states[name], some) for name, some in moves.items()}
        runs: dict[int, list[Used]] = {}
        for each in used:
            runs.setdefault(id(each.slots.run), []).append(each)
        for group in runs.values():
            self._add(group, coefficients)

    @staticmethod
    def _advance(state: State, lines: Sequence[tuple[int, ParameterStep]]) -> Coefficients:
        """Carry a state over the steps without their gradients; for each step what its gradient adds to W and M."""
        w, x, m, y = 1.0, 0.0, 0.0, 1.0  # the product of the steps' matrices: (w x) gives W, (m y) gives M
        found = {}
        for step, line in reversed(lines):
            t = line.transition
            if t is not None:
                found[step] = (w * t.wg + x * t.mg) * line.scale, (m * t.wg + y * t.mg) * line.scale
                w, x = w * t.ww + x * t.mw, w * t.wm + x * t.mm
                m, y = m * t.ww + y * t.mw, m * t.wm + y * t.mm
        state.moves += len(lines)
        state.weight, state.buffer = w * state.weight + x * state.buffer, m * state.weight + y * state.buffer
        return found

    def _add(self, used: Sequence[Used], coefficients: Mapping[str, Coefficients]) -> None:
        """Add what the rows of a run put into the followed entries of its layer's parameters."""
        layer, run = used[0].slots.layer, used[0].slots.run
        if run.errors is None:
            return
        rows, sizes = _rows(used)
        biases = {module.name: module.bias for module in layer.modules}
        keys, errors = run.columns(rows)
        for name in layer.parameters:
            state = self.states.get(name)
            if state is None:
                continue
            weight = name == layer.weight
            value = np.array([_value(each, name, weight, biases, coefficients[name]) for each in used])
            value = value.repeat(sizes, axis=0)
            value *= errors.scale[:, None]
            if not weight:
                added = errors.values.T @ value
                state.weight, state.buffer = state.weight + added[:, :1], state.buffer + added[:, 1:]
                continue
            value *= keys.scale[:, None]
            state.weight += errors.values.T @ (keys.values * value[:, :1])
            if value[:, 1].any():
                state.buffer += errors.values.T @ (keys.values * value[:, 1:])

    def certificate(self, actual: Mapping[str, Tensor]) -> dict[str, Agreement]:
        """Compare with the real weights of this moment."""
        return {name: self._agree(state, actual[name]) for name, state in self.states.items()}

    @staticmethod
    def _agree(state: State, actual: Tensor) -> Agreement:
        first, rebuilt = torch.from_numpy(state.first), torch.from_numpy(state.weight)
        return agreement(state.entries.of(actual), first, rebuilt, None, state.moves)


def _value(
    used: Used, name: str, weight: bool, biases: Mapping[str, str | None], of_step: Coefficients
) -> tuple[float, float]:  # fmt: skip
    """What the slots count for in a parameter, and in the optimiser's buffer of it."""
    factor = used.factor if weight else used.bias_factor if biases[used.slots.module] == name else 0.0
    in_weight, in_buffer = of_step.get(used.step, (0.0, 0.0))
    return factor * in_weight, factor * in_buffer


def _rows(used: Sequence[Used]) -> tuple[slice | np.ndarray, list[int]]:
    """Where the rows of some slots of one run lie, and how many each has."""
    begins, ends = [each.slots.begin for each in used], [each.slots.end for each in used]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    if begins[1:] == ends[:-1]:
        return slice(begins[0], ends[-1]), sizes
    return np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]), sizes


def _numbers(cut: slice) -> Int[np.ndarray, " k"]:
    return np.arange(cut.start, cut.stop)
