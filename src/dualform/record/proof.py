r"""The certificate, built up while training runs.

Of each recorded parameter a few hundred random entries (some rows and columns of it) are carried from step to step by
the optimiser's own recurrence, fed with nothing but the slots *as they are stored*. Whenever a shard is complete they
are compared with the real weights, so every shard on disk comes with its certificate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.attend import Agreement, View, agreement, entries, initial_part
from dualform.memory import ParameterStep, Store
from dualform.types import LayerInfo

from .plan import Plan
from .stage import Run, Slots

SIDE = 16
"""Rows and columns that are followed of a weight."""

Used = tuple[int, Slots, float]
"""A step, slots that it used up, and their factor."""


@dataclass(frozen=True)
class Entries:
    """Some rows and columns of a weight, or some rows of a bias."""

    rows: Int[np.ndarray, " r"]
    columns: Int[np.ndarray, " c"] | None

    def of(self, tensor: Tensor) -> Shaped[Tensor, "r c"]:
        """Those of a tensor."""
        tensor = tensor.detach().cpu()[torch.from_numpy(self.rows)]
        return tensor.unsqueeze(1) if self.columns is None else tensor[:, torch.from_numpy(self.columns)]


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
        self.layers = {name: layer for layer in plan.layers for name in _parameters(layer)}
        self.states = {name: self._state(store, name, step) for name in plan.explained}
        self._coefficients: dict[str, dict[int, tuple[float, float]]] = {}

    def _state(self, store: Store, name: str, step: int) -> State:
        layer = self.layers[name]
        which = Entries(_some(layer.d_out), _some(layer.d_in) if name == layer.weight else None)
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
            if name in _parameters(layer):
                total = total + entries(store, layer, name, View(step), which.rows, which.columns, of).numpy()
        return total

    def take(
        self, lines: Sequence[tuple[int, ParameterStep]], used: Sequence[Used]
    ) -> None:  # fmt: skip
        """Go on by some steps: their lines, and the slots they used up."""
        self._coefficients = {name: self._advance(name, lines) for name in self.plan.explained}
        runs: dict[int, list[Used]] = {}
        for each in used:
            runs.setdefault(id(each[1].run), []).append(each)
        for group in runs.values():
            self._add(group[0][1].layer, group[0][1].run, group)

    def _advance(self, name: str, lines: Sequence[tuple[int, ParameterStep]]) -> dict[int, tuple[float, float]]:
        """Carry a state over the steps without their gradients; for each step what its gradient adds to W and M."""
        state = self.states[name]
        w, x, m, y = 1.0, 0.0, 0.0, 1.0  # the product of the steps' matrices: (w x) gives W, (m y) gives M
        found = {}
        for step, line in reversed(lines):
            t = line.transition
            if line.parameter == name and t is not None:
                found[step] = (w * t.wg + x * t.mg) * line.scale, (m * t.wg + y * t.mg) * line.scale
                w, x = w * t.ww + x * t.mw, w * t.wm + x * t.mm
                m, y = m * t.ww + y * t.mw, m * t.wm + y * t.mm
                state.moves += 1
        state.weight, state.buffer = w * state.weight + x * state.buffer, m * state.weight + y * state.buffer
        return found

    def _add(self, layer: LayerInfo, run: Run, used: Sequence[Used]) -> None:
        """Add what the rows of a run put into the followed entries of its layer's parameters."""
        if run.errors is None:
            return
        biases = {module.name: module.bias for module in layer.modules}
        for name in _parameters(layer):
            state = self.states.get(name)
            if state is None:
                continue
            values = np.zeros((len(run.keys), 2))
            for step, slots, factor in used:
                if name in (layer.weight, biases[slots.module]) and step in self._coefficients[name]:
                    weight, buffer = self._coefficients[name][step]
                    values[slots.begin : slots.end] = weight * factor, buffer * factor
            which = state.entries
            e = run.error_columns(which.rows)
            x = np.ones((len(e), 1)) if which.columns is None else run.key_columns(which.columns)
            state.weight += e.T @ (x * values[:, :1])
            state.buffer += e.T @ (x * values[:, 1:])

    def certificate(self, actual: Mapping[str, Tensor]) -> dict[str, Agreement]:
        """Compare with the real weights of this moment."""
        return {name: self._agree(state, actual[name]) for name, state in self.states.items()}

    @staticmethod
    def _agree(state: State, actual: Tensor) -> Agreement:
        first, rebuilt = torch.from_numpy(state.first), torch.from_numpy(state.weight)
        return agreement(state.entries.of(actual), first, rebuilt, None, state.moves)


def _parameters(layer: LayerInfo) -> list[str]:
    return list(dict.fromkeys([layer.weight, *(module.bias for module in layer.modules if module.bias)]))


def _some(size: int) -> Int[np.ndarray, " k"]:
    """Some indices below ``size``, in order."""
    return np.arange(size) if size <= SIDE else np.sort(np.random.default_rng(size).choice(size, SIDE, replace=False))
