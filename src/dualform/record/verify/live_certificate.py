r"""The live certificate: computed while training runs, so that every shard has one.

Each recorded parameter is carried from step to step by the optimiser's own recurrence, in two ways. A few dozen entries
(some rows and columns) receive only the slots *as they are stored*: they show the rounding error of storing slots. And
the whole parameter, as the probe of its gradient shows it (``gradient_probe.py``), receives what slots put into the
gradient: it shows whatever else moved the weights, anywhere in the parameter. Whenever a shard is complete, both are
compared with the real weights, and the larger difference counts.

Under a rule that divides each entry by a number of its own, a random direction of the weights has no recurrence, so the
second way is only used for biases and small weights. Rules that need a whole matrix to move one of its entries
(Adafactor, Muon) cannot be followed at all; their parameters are certified when the recording is closed.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dualform.engine import Agreement, ParameterState, Rounding, advance, compare, state_at
from dualform.rules import Rule
from dualform.store import ParameterStep, Store
from dualform.types import LayerInfo

from ..distributed import Ranks
from ..plan import CertificateEntries, RecordingPlan, columns_for, sizes_of
from ..slots import CallSlots
from .gradient_follower import GradientFollower
from .gradient_probe import GradientProbe


class UsedSlots(NamedTuple):
    """Slots that a step used up, and their factors in the gradients of weight and bias."""

    step: int
    slots: CallSlots
    factor: float
    bias_factor: float


StepLine = tuple[int, ParameterStep]
"""A step of a parameter: a row of the table of steps."""


class LiveCertificate:
    """Follows all recorded parameters whose rule moves each entry by itself."""

    def __init__(
        self, plan: RecordingPlan, store: Store, step: int, ranks: Ranks, followers: Mapping[str, GradientFollower]
    ) -> None:
        self.plan, self.ranks = plan, ranks
        self.by_entries: dict[str, ScalarFollower | PreconditionedFollower] = {}
        """A few entries of each parameter, computed from slots as they are stored."""
        self.by_probe: dict[str, ScalarFollower | PreconditionedFollower] = {}
        """Whole parameters, computed from slots before they are stored."""
        self.stored = getattr(torch, store.manifest.dtype)
        rules = {name: rule for name in plan.explained if (rule := plan.rule(name)) is None or rule.local}
        for name, state in state_at(store, list(rules), step).items():
            rule, patch = rules[name], plan.patches[name]
            kind = ScalarFollower if rule is None or rule.precondition is None else PreconditionedFollower
            moves = int((store.schedule(name).steps <= step).sum())
            self.by_entries[name] = kind(name, patch, rule, store.initial(name), state, moves)
            probe = followers[name].probe
            if kind is ScalarFollower or probe.entrywise:
                self.by_probe[name] = kind(name, probe, rule, store.initial(name), state, moves)
            for follower in self._followers_of(name):
                follower.squares = moves * store.gradient_eps(name, step) ** 2
        self.places = {layer.name: _places(layer, plan) for layer in plan.layers}

    def take(
        self, lines: Sequence[StepLine], used: Sequence[UsedSlots], sums: Mapping[tuple[int, str], Float[Tensor, " p"]]
    ) -> None:
        """Follow some steps: their rows, the slots they used up, and the probe of what those put into the gradient of
        each parameter in each step.
        """
        moves: dict[str, list[StepLine]] = {name: [] for name in self.by_entries}
        for step, line in lines:
            if line.parameter in moves:
                moves[line.parameter].append((step, line))
        for name, parameter_lines in moves.items():
            self.by_entries[name].begin(parameter_lines)
            for follower in self._followers_of(name):
                follower.squares += sum(line.gradient_eps**2 for _, line in parameter_lines)
            if probed := self.by_probe.get(name):
                probed.begin(parameter_lines)
                steps = [step for step, _ in parameter_lines]
                probed.add_gradients({step: sums[step, name] for step in steps if (step, name) in sums})
                probed.end(parameter_lines)
        runs: dict[int, list[UsedSlots]] = {}
        for used_slots in used:
            runs.setdefault(id(used_slots.slots.run), []).append(used_slots)
        for group in runs.values():
            self._add(group)
        self.ranks.add_up([tensor for follower in self.by_entries.values() for tensor in follower.more])
        for name, parameter_lines in moves.items():
            self.by_entries[name].end(parameter_lines)

    def _add(self, used: Sequence[UsedSlots]) -> None:
        """Add what the rows of a run put into the followed entries of its layer's parameters."""
        layer, run = used[0].slots.layer, used[0].slots.run
        if run.errors is None:
            return
        rows, sizes = _rows(used)
        keys, errors = run.columns(rows)
        biases = {module.name: module.biases for module in layer.modules}
        for name, place in self.places[layer.name].items():
            follower = self.by_entries.get(name)
            if follower is None:
                continue
            weight = name in layer.weights
            factors = [
                call.factor if weight else call.bias_factor if name in biases[call.slots.module] else 0.0
                for call in used
            ]
            scale = errors.scale * keys.scale if weight else errors.scale
            key_columns = keys.values[:, place] if place is not None else None
            steps = [call.step for call in used]
            follower.add(layer, steps, factors, sizes, key_columns, errors.values * scale[:, None])

    def _followers_of(self, name: str) -> list["ScalarFollower | PreconditionedFollower"]:
        return [followers[name] for followers in (self.by_entries, self.by_probe) if name in followers]

    def forget(self, name: str) -> None:
        """Follow a parameter no longer."""
        self.by_entries.pop(name, None)
        self.by_probe.pop(name, None)

    def give_up(self) -> None:
        """Follow nothing any more: the certificate is computed from the disk when recording ends."""
        self.by_entries, self.by_probe = {}, {}

    def agreements(self, actual: Mapping[str, Tensor]) -> dict[str, Agreement]:
        """Compare with the actual weights of this moment."""
        return {name: self._agreement(name, actual[name]) for name in self.by_entries}

    def _agreement(self, name: str, actual: Tensor) -> Agreement:
        now, probed, entries = actual.detach().cpu(), self.by_probe.get(name), self.by_entries[name]
        sizes = float((now - entries.begun).norm()), float(now.norm())
        stored_agreement = entries.agree(now, *sizes)
        if probed is None:
            return stored_agreement
        agreed = probed.agree(now, *sizes)
        exact = torch.promote_types(self.stored, actual.dtype) is self.stored  # slots are stored without rounding
        return agreed if exact or agreed.error > stored_agreement.error else stored_agreement


class FollowedParameter:
    """Some numbers of a parameter, computed from the slots step by step; ``view`` reads them off the real parameter."""

    def __init__(
        self,
        name: str,
        view: CertificateEntries | GradientProbe,
        rule: Rule | None,
        first: Tensor,
        state: ParameterState,
        moves: int,
    ) -> None:
        self.name, self.view, self.rule, self.moves = name, view, rule, moves
        self.eps, self.begun = torch.finfo(first.dtype).eps, first
        self.state = state.patch(lambda tensor: view.of(tensor).double())
        self.shape = self.state.weight.shape

    squares = 0.0
    """The sum over all steps of the squared precision in which the gradient was computed."""
    more: Sequence[Tensor]
    """What slots have added in the steps that are being followed."""

    def agree(self, now: Tensor, moved: float, size: float) -> Agreement:
        """Compare with the real parameter: the error of the followed numbers, relative to how far the whole parameter
        ``moved`` and to its ``size``.
        """
        off = float((self.view.of(now).double() - self.state.weight).norm()) * self.view.share(now.numel()) ** -0.5
        eps = Rounding(self.eps, (self.squares / max(self.moves, 1)) ** 0.5)
        return compare(off, moved, size, self.moves, eps)

    def product(self, layer: LayerInfo, keys: np.ndarray | None, errors: np.ndarray) -> Float[np.ndarray, "r c"]:
        """What some rows add to the followed entries of the gradient: keys (none for a bias) times errors."""
        if keys is None:
            return errors.sum(0)[:, None]
        if layer.indexed:
            assert isinstance(self.view, CertificateEntries)
            out = np.zeros(self.shape)
            token = keys[:, 0].astype(np.int64) - self.view.rows.start
            inside = (token >= 0) & (token < len(out))
            np.add.at(out, token[inside], errors[inside])
            return out
        piece = next(piece for piece in layer.pieces if piece.parameter == self.name)
        return keys.T @ errors if piece.transposed else errors.T @ keys


class ScalarFollower(FollowedParameter):
    """Under a scalar rule many steps are summed at once, with the coefficients that they have after the last one."""

    def begin(self, lines: Sequence[StepLine]) -> None:
        """Carry the state over the steps without their gradients; find the coefficients of each gradient in W and M."""
        w, x, m, y = 1.0, 0.0, 0.0, 1.0  # the product of the steps' matrices: (w x) gives W, (m y) gives M
        self._coefficients: dict[int, tuple[float, float]] = {}
        for step, line in reversed(lines):
            t = line.transition
            if t is not None:
                self._coefficients[step] = (w * t.wg + x * t.mg) * line.scale, (m * t.wg + y * t.mg) * line.scale
                w, x = w * t.ww + x * t.mw, w * t.wm + x * t.mm
                m, y = m * t.ww + y * t.mw, m * t.wm + y * t.mm
        self.moves += len(lines)
        weight, buffer = self.state.weight, self.state.buffer
        self.state = ParameterState(w * weight + x * buffer, m * weight + y * buffer, {})
        self.more = torch.zeros_like(weight), torch.zeros_like(weight)

    def add(
        self, layer: LayerInfo, steps: Sequence[int], factors: Sequence[float], sizes: Sequence[int],
        keys: np.ndarray | None, errors: np.ndarray,
    ) -> None:  # fmt: skip
        """Add the rows of some calls: the step and factor of each call, and its number of rows."""
        value = np.array([self._coefficients.get(step, (0.0, 0.0)) for step in steps]) * np.array(factors)[:, None]
        value = value.repeat(sizes, axis=0)
        self.more[0].add_(torch.from_numpy(self.product(layer, keys, errors * value[:, :1])))
        if value[:, 1].any():
            self.more[1].add_(torch.from_numpy(self.product(layer, keys, errors * value[:, 1:])))

    def add_gradients(self, gradients: Mapping[int, Float[Tensor, " p"]]) -> None:
        """Add the probe of each step's gradient."""
        if gradients:
            values = torch.tensor([self._coefficients.get(step, (0.0, 0.0)) for step in gradients], dtype=torch.float64)
            more = values.mT @ torch.stack([*gradients.values()]).double()
            for total, part in zip(self.more, more, strict=True):
                total.add_(part)

    def end(self, lines: Sequence[StepLine]) -> None:
        """Add what the slots have put into the gradients."""
        self.state.weight.add_(self.more[0])
        self.state.buffer.add_(self.more[1])
        self.more = ()


class PreconditionedFollower(FollowedParameter):
    """Under a preconditioned rule the steps are computed again, one by one."""

    def begin(self, lines: Sequence[StepLine]) -> None:
        """Begin with gradients of zero."""
        self.more = [torch.zeros(self.shape, dtype=torch.float64) for _ in lines]
        self._gradients = {step: gradient.numpy() for (step, _), gradient in zip(lines, self.more, strict=True)}

    def add(
        self, layer: LayerInfo, steps: Sequence[int], factors: Sequence[float], sizes: Sequence[int],
        keys: np.ndarray | None, errors: np.ndarray,
    ) -> None:  # fmt: skip
        """Add the rows of some calls: the step and factor of each call, and its number of rows."""
        ends = np.cumsum(sizes)
        for step, factor, size, end in zip(steps, factors, sizes, ends, strict=True):
            if step in self._gradients and factor:
                rows = slice(end - size, end)
                part = self.product(layer, None if keys is None else keys[rows], errors[rows])
                self._gradients[step] += factor * part

    def add_gradients(self, gradients: Mapping[int, Float[Tensor, " p"]]) -> None:
        """Add the probe of each step's gradient."""
        for step, gradient in gradients.items():
            self._gradients[step] += gradient.numpy()

    def end(self, lines: Sequence[StepLine]) -> None:
        """Compute the steps."""
        assert self.rule is not None
        for step, line in lines:
            if line.transition is not None:
                gradient = torch.from_numpy(self._gradients[step]).mul_(line.scale)
                self.state = advance(self.rule, line.transition, line.settings, self.state, gradient, self.eps)
        self.moves += len(lines)
        self._gradients, self.more = {}, ()


def _places(layer: LayerInfo, plan: RecordingPlan) -> dict[str, slice | None]:
    """The followed key columns of each weight of a layer; None for a bias."""
    ends = np.cumsum([0, *sizes_of(columns_for(layer, plan.patches).keys)]).tolist()
    places: dict[str, slice | None] = {
        piece.parameter: slice(0, 1) if layer.indexed else slice(ends[i], ends[i + 1])
        for i, piece in enumerate(layer.pieces)
    }
    return places | {bias: None for bias in layer.biases}


def _rows(used: Sequence[UsedSlots]) -> tuple[slice | np.ndarray, list[int]]:
    """The rows of some slots in their run, and the number of rows of each."""
    begins, ends = [call.slots.begin for call in used], [call.slots.end for call in used]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    if begins[1:] == ends[:-1]:
        return slice(begins[0], ends[-1]), sizes
    return np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]), sizes
