r"""The certificate, built up while training runs.

For each recorded parameter a few random projections :math:`W_s V` and :math:`M_s V` are carried from step to step by
the optimiser's own recurrence, fed with nothing but the slots *as they are stored*. Whenever a shard is complete they
are compared with the real weights, so every shard on disk comes with its certificate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualform.attend import Agreement, agreement, probes, projected, row_sums
from dualform.memory import COMPUTED, ParameterStep, Store
from dualform.types import DType, LayerInfo

from .plan import Plan
from .stage import Run, Slots

Used = tuple[int, Slots, float]
"""A step, slots that it used up, and their factor."""


@dataclass
class State:
    """One parameter seen through ``project`` (None: as it is): at first, and W above M as the slots give them now."""

    project: Float[Tensor, "d_in p"] | None
    first: Float[Tensor, "d_out p"]
    now: Float[Tensor, "2 p d_out"]
    moves: int
    at_hand: Float[Tensor, "d_in p"] | None
    """``project`` in the precision that slots are added up in."""


class Proof:
    """Follows all recorded parameters."""

    def __init__(self, plan: Plan, dtype: DType, store: Store, step: int) -> None:
        self.plan, self.dtype = plan, COMPUTED[dtype]
        layers = {name: layer for layer in plan.layers for name in _parameters(layer)}
        self.states: dict[str, State] = {}
        for name in plan.explained:
            project = probes(layers[name].d_in) if name == layers[name].weight else None
            first = projected(store.initial(name).double(), project)
            weight, buffer = row_sums(store, name, step, project) if step else _start(store, name, project)
            moves = int((store.schedule(name)[0] <= step).sum()) if step else 0
            at_hand = None if project is None else project.to(self.dtype)
            self.states[name] = State(project, first, torch.stack([weight.mT, buffer.mT]), moves, at_hand)
        self._coefficients: dict[str, dict[int, tuple[float, float]]] = {}
        self._used: dict[int, Used] = {}
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def advance(self, lines: Sequence[tuple[int, ParameterStep]], used: Sequence[Used]) -> None:
        """Go on by some steps: their lines, and the slots they used up. The rows of these follow."""
        self._coefficients = {name: self._advance(name, lines) for name in self.plan.explained}
        self._used = {id(each[1]): each for each in used}

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
        weight, buffer = state.now
        state.now = torch.stack([w * weight + x * buffer, m * weight + y * buffer])
        return found

    def follow(self, slots: Sequence[Slots], run: Run) -> Callable[[slice], None]:
        """What to do with the rows of a run as they become ready."""
        inside = [self._used.pop(id(each)) for each in slots if id(each) in self._used]
        if run.errors is None or not inside:
            return _nothing
        layer = slots[0].layer
        return partial(self._add, run, layer, self._values(layer, len(run.keys), inside))

    def finish(self) -> None:
        """Take the slots that were encoded before their step came."""
        runs: dict[int, list[Slots]] = {}
        for _, slots, _ in self._used.values():
            runs.setdefault(id(slots.run), []).append(slots)
        for group in runs.values():
            run = group[0].run
            self.follow(group, run)(slice(0, len(run.keys)))

    def _values(self, layer: LayerInfo, rows: int, used: Sequence[Used]) -> dict[str, Float[Tensor, "rows 2"]]:
        """For each parameter of a layer what every row of a run adds to W and M."""
        biases = {module.name: module.bias for module in layer.modules}
        values = {name: np.zeros((rows, 2)) for name in _parameters(layer) if name in self.states}
        for step, slots, factor in used:
            for name in (layer.weight, biases[slots.module]):
                if name in values and step in self._coefficients[name]:
                    weight, buffer = self._coefficients[name][step]
                    values[name][slots.begin : slots.end] = weight * factor, buffer * factor
        return {name: torch.from_numpy(value).to(self.dtype) for name, value in values.items()}

    def _add(self, run: Run, layer: LayerInfo, values: Mapping[str, Tensor], cut: slice) -> None:
        """Add what some rows put into the weight and the biases of their layer: one product for all of them."""
        keys, errors = run.rows(cut)
        assert errors is not None
        features = []
        for name, value in values.items():
            part = value[cut]
            if name == layer.weight:
                seen, project = self._decoded("keys", keys.values), self.states[name].at_hand
                seen = seen if project is None else seen @ project
                if keys.exponents is not None:
                    part = part * torch.exp2(keys.exponents.to(self.dtype)).unsqueeze(1)
                features += [seen * part[:, :1], seen * part[:, 1:]]
            else:
                features.append(part)
        together = torch.cat(features, 1)
        if errors.exponents is not None:
            together *= torch.exp2(errors.exponents.to(self.dtype)).unsqueeze(1)
        sums = together.mT @ self._decoded("errors", errors.values)
        begin = 0
        for name in values:
            now = self.states[name].now
            size = now.shape[0] * now.shape[1]
            now += sums[begin : begin + size].view(now.shape)
            begin += size

    def _decoded(self, what: str, stored: Tensor) -> Tensor:
        """Stored numbers to compute with, in memory that is used again."""
        if stored.dtype == self.dtype:
            return stored
        buffer = self._buffers.get((what, stored.shape[1]))
        if buffer is None or len(buffer) < len(stored):
            buffer = self._buffers[what, stored.shape[1]] = torch.empty(stored.shape, dtype=self.dtype)
        return buffer[: len(stored)].copy_(stored)

    def certificate(self, actual: Mapping[str, Tensor]) -> dict[str, Agreement]:
        """Compare with the real weights of this moment."""
        return {
            name: agreement(actual[name], state.first, state.now[0].mT, state.project, state.moves)
            for name, state in self.states.items()
        }


def _parameters(layer: LayerInfo) -> list[str]:
    return list(dict.fromkeys([layer.weight, *(module.bias for module in layer.modules if module.bias)]))


def _start(store: Store, name: str, project: Tensor | None) -> tuple[Float[Tensor, "d p"], Float[Tensor, "d p"]]:
    first, buffer = projected(store.initial(name).double(), project), store.initial_buffer(name)
    return first, torch.zeros_like(first) if buffer is None else projected(buffer.double(), project)


def _nothing(cut: slice) -> None:
    """For rows that no parameter is rebuilt from."""
