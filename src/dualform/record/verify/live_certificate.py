r"""The certificate, built up while training runs.

Each recorded parameter is carried from step to step by the optimiser's own recurrence, in two ways. A few dozen entries
(some rows and columns) are fed with nothing but the slots *as they are stored*: that shows what storing them rounds
off. And the parameter as a whole, seen through the probe of its gradient (``gradient_probe.py``), is fed with what
slots put into it: that shows whatever else moved the weights, wherever in the parameter. Whenever a shard is complete
both are compared with the real weights and the larger difference counts: every shard comes with its certificate.

Under a rule that divides each entry by a number of its own, a random direction of the weights cannot be carried on, so
there the second way is for biases and weights of few entries. Rules that need a whole matrix to move one of its entries
(Adafactor, Muon) cannot be followed at all; their parameters are checked when the recording is closed.
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
    """Slots that a step used up, and what they count for in the gradients of weight and bias."""

    step: int
    slots: CallSlots
    factor: float
    bias_factor: float


StepLine = tuple[int, ParameterStep]


class LiveCertificate:
    """Follows all recorded parameters whose rule lets it."""

    def __init__(
        self, plan: RecordingPlan, store: Store, step: int, ranks: Ranks, followers: Mapping[str, GradientFollower]
    ) -> None:
        self.plan, self.ranks = plan, ranks
        self.proofs: dict[str, ScalarFollower | PreconditionedFollower] = {}
        """A few entries of each parameter, from slots as they are stored."""
        self.wholes: dict[str, ScalarFollower | PreconditionedFollower] = {}
        """Each parameter whole, from slots as they were."""
        self.stored = getattr(torch, store.manifest.dtype)
        rules = {name: rule for name in plan.explained if (rule := plan.rule(name)) is None or rule.local}
        for name, state in state_at(store, list(rules), step).items():
            rule, patch = rules[name], plan.patches[name]
            kind = ScalarFollower if rule is None or rule.precondition is None else PreconditionedFollower
            moves = int((store.schedule(name).steps <= step).sum())
            self.proofs[name] = kind(name, patch, rule, store.initial(name), state, moves)
            probe = followers[name].probe
            if kind is ScalarFollower or probe.entrywise:
                self.wholes[name] = kind(name, probe, rule, store.initial(name), state, moves)
            for followed in self._followed(name):
                followed.squares = moves * store.gradient_eps(name, step) ** 2
        self.places = {layer.name: _places(layer, plan) for layer in plan.layers}

    def take(
        self, lines: Sequence[StepLine], used: Sequence[UsedSlots], sums: Mapping[tuple[int, str], Float[Tensor, " p"]]
    ) -> None:
        """Go on by some steps: their lines, the slots they used up, and what those put into the gradient of each
        parameter in each step, seen through its probe.
        """
        moves: dict[str, list[StepLine]] = {name: [] for name in self.proofs}
        for step, line in lines:
            if line.parameter in moves:
                moves[line.parameter].append((step, line))
        for name, some in moves.items():
            self.proofs[name].begin(some)
            for followed in self._followed(name):
                followed.squares += sum(line.gradient_eps**2 for _, line in some)
            if whole := self.wholes.get(name):
                whole.begin(some)
                steps = [step for step, _ in some]
                whole.add_gradients({step: sums[step, name] for step in steps if (step, name) in sums})
                whole.end(some)
        runs: dict[int, list[UsedSlots]] = {}
        for each in used:
            runs.setdefault(id(each.slots.run), []).append(each)
        for group in runs.values():
            self._add(group)
        self.ranks.add_up([tensor for proof in self.proofs.values() for tensor in proof.more])
        for name, some in moves.items():
            self.proofs[name].end(some)

    def _add(self, used: Sequence[UsedSlots]) -> None:
        """Add what the rows of a run put into the followed entries of its layer's parameters."""
        layer, run = used[0].slots.layer, used[0].slots.run
        if run.errors is None:
            return
        rows, sizes = _rows(used)
        keys, errors = run.columns(rows)
        biases = {module.name: module.biases for module in layer.modules}
        for name, place in self.places[layer.name].items():
            proof = self.proofs.get(name)
            if proof is None:
                continue
            weight = name in layer.weights
            factors = [
                each.factor if weight else each.bias_factor if name in biases[each.slots.module] else 0.0
                for each in used
            ]
            scale = errors.scale * keys.scale if weight else errors.scale
            cut = keys.values[:, place] if place is not None else None
            proof.add(layer, [each.step for each in used], factors, sizes, cut, errors.values * scale[:, None])

    def _followed(self, name: str) -> list["ScalarFollower | PreconditionedFollower"]:
        return [follows[name] for follows in (self.proofs, self.wholes) if name in follows]

    def forget(self, name: str) -> None:
        """Follow a parameter no longer."""
        self.proofs.pop(name, None)
        self.wholes.pop(name, None)

    def give_up(self) -> None:
        """Follow nothing any more: the certificate is made from the disk when recording ends."""
        self.proofs, self.wholes = {}, {}

    def agreements(self, actual: Mapping[str, Tensor]) -> dict[str, Agreement]:
        """Compare with the real weights of this moment."""
        return {name: self._agreement(name, actual[name]) for name in self.proofs}

    def _agreement(self, name: str, actual: Tensor) -> Agreement:
        now, whole, proof = actual.detach().cpu(), self.wholes.get(name), self.proofs[name]
        sizes = float((now - proof.begun).norm()), float(now.norm())
        entries = proof.agree(now, *sizes)
        if whole is None:
            return entries
        agreed = whole.agree(now, *sizes)
        exact = torch.promote_types(self.stored, actual.dtype) is self.stored  # then all slots are stored as they were
        return agreed if exact or agreed.error > entries.error else entries


class FollowedParameter:
    """What is followed of a parameter: at first, and by now as the slots give it. ``look`` takes it from the whole."""

    def __init__(
        self,
        name: str,
        look: CertificateEntries | GradientProbe,
        rule: Rule | None,
        first: Tensor,
        state: ParameterState,
        moves: int,
    ) -> None:
        self.name, self.look, self.rule, self.moves = name, look, rule, moves
        self.eps, self.begun = torch.finfo(first.dtype).eps, first
        self.state = state.patch(lambda tensor: look.of(tensor).double())
        self.shape = self.state.weight.shape

    squares = 0.0
    """The squares of the precisions in which gradients were computed, added up over the moves."""
    more: Sequence[Tensor]
    """What slots have added since the steps began that are being taken."""

    def agree(self, now: Tensor, moved: float, size: float) -> Agreement:
        """Compare with the real parameter: what the followed entries are off by, beside how far the whole ``moved``,
        and its ``size``.
        """
        off = float((self.look.of(now).double() - self.state.weight).norm()) * self.look.share(now.numel()) ** -0.5
        eps = Rounding(self.eps, (self.squares / max(self.moves, 1)) ** 0.5)
        return compare(off, moved, size, self.moves, eps)

    def product(self, layer: LayerInfo, keys: np.ndarray | None, errors: np.ndarray) -> Float[np.ndarray, "r c"]:
        """What some rows put into the followed entries of the gradient: keys (none for a bias) times errors."""
        if keys is None:
            return errors.sum(0)[:, None]
        if layer.indexed:
            assert isinstance(self.look, CertificateEntries)
            out = np.zeros(self.shape)
            token = keys[:, 0].astype(np.int64) - self.look.rows.start
            inside = (token >= 0) & (token < len(out))
            np.add.at(out, token[inside], errors[inside])
            return out
        piece = next(piece for piece in layer.pieces if piece.parameter == self.name)
        return keys.T @ errors if piece.transposed else errors.T @ keys


class ScalarFollower(FollowedParameter):
    """Under a scalar rule many steps are added up at once, with the coefficients that they have at the end."""

    def begin(self, lines: Sequence[StepLine]) -> None:
        """Carry the state over the steps without their gradients; for each step what its gradient adds to W and M."""
        w, x, m, y = 1.0, 0.0, 0.0, 1.0  # the product of the steps' matrices: (w x) gives W, (m y) gives M
        self._found: dict[int, tuple[float, float]] = {}
        for step, line in reversed(lines):
            t = line.transition
            if t is not None:
                self._found[step] = (w * t.wg + x * t.mg) * line.scale, (m * t.wg + y * t.mg) * line.scale
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
        """Take the rows of some calls: the step and factor of each call, and how many rows it has."""
        value = np.array([self._found.get(step, (0.0, 0.0)) for step in steps]) * np.array(factors)[:, None]
        value = value.repeat(sizes, axis=0)
        self.more[0].add_(torch.from_numpy(self.product(layer, keys, errors * value[:, :1])))
        if value[:, 1].any():
            self.more[1].add_(torch.from_numpy(self.product(layer, keys, errors * value[:, 1:])))

    def add_gradients(self, gradients: Mapping[int, Float[Tensor, " p"]]) -> None:
        """Take what slots put into the gradient of each step."""
        if gradients:
            values = torch.tensor([self._found.get(step, (0.0, 0.0)) for step in gradients], dtype=torch.float64)
            more = values.mT @ torch.stack([*gradients.values()]).double()
            for total, part in zip(self.more, more, strict=True):
                total.add_(part)

    def end(self, lines: Sequence[StepLine]) -> None:
        """Take what the slots added."""
        self.state.weight.add_(self.more[0])
        self.state.buffer.add_(self.more[1])
        self.more = ()


class PreconditionedFollower(FollowedParameter):
    """Under a preconditioned rule the steps are run again, one by one."""

    def begin(self, lines: Sequence[StepLine]) -> None:
        """Gradients are collected first."""
        self.more = [torch.zeros(self.shape, dtype=torch.float64) for _ in lines]
        self._gradients = {step: gradient.numpy() for (step, _), gradient in zip(lines, self.more, strict=True)}

    def add(
        self, layer: LayerInfo, steps: Sequence[int], factors: Sequence[float], sizes: Sequence[int],
        keys: np.ndarray | None, errors: np.ndarray,
    ) -> None:  # fmt: skip
        """Take the rows of some calls: the step and factor of each call, and how many rows it has."""
        ends = np.cumsum(sizes)
        for step, factor, size, end in zip(steps, factors, sizes, ends, strict=True):
            if step in self._gradients and factor:
                rows = slice(end - size, end)
                part = self.product(layer, None if keys is None else keys[rows], errors[rows])
                self._gradients[step] += factor * part

    def add_gradients(self, gradients: Mapping[int, Float[Tensor, " p"]]) -> None:
        """Take what slots put into the gradient of each step."""
        for step, gradient in gradients.items():
            self._gradients[step] += gradient.numpy()

    def end(self, lines: Sequence[StepLine]) -> None:
        """Run the steps."""
        assert self.rule is not None
        for step, line in lines:
            if line.transition is not None:
                gradient = torch.from_numpy(self._gradients[step]).mul_(line.scale)
                self.state = advance(self.rule, line.transition, line.settings, self.state, gradient, self.eps)
        self.moves += len(lines)
        self._gradients, self.more = {}, ()


def _places(layer: LayerInfo, plan: RecordingPlan) -> dict[str, slice | None]:
    """Which of the followed key columns belong to each weight of a layer; None for a bias."""
    ends = np.cumsum([0, *sizes_of(columns_for(layer, plan.patches).keys)]).tolist()
    found: dict[str, slice | None] = {
        piece.parameter: slice(0, 1) if layer.indexed else slice(ends[i], ends[i + 1])
        for i, piece in enumerate(layer.pieces)
    }
    return found | {bias: None for bias in layer.biases}


def _rows(used: Sequence[UsedSlots]) -> tuple[slice | np.ndarray, list[int]]:
    """Where the rows of some slots of one run lie, and how many each has."""
    begins, ends = [each.slots.begin for each in used], [each.slots.end for each in used]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    if begins[1:] == ends[:-1]:
        return slice(begins[0], ends[-1]), sizes
    return np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]), sizes
