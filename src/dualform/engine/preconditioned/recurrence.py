r"""Training run again from the slots, step by step, for optimisers that divide each entry by its own number.

A preconditioned rule has a linear map P that all examples share. It is made anew at each step from the whole gradient
:math:`G_s = E_s^\top X_s` and the optimiser's other state; and with P known, the part that any group of slots has in
the weights goes through the very same recurrence:

.. math:: \begin{bmatrix} W^g \\ M^g \end{bmatrix}_s = A_s \begin{bmatrix} W^g \\ M^g \end{bmatrix}_{s-1} + b_s\, g^g_s

with A and b made of numbers and P. What is left of the beginning is one more group, without gradients. Whenever the
whole state was kept on disk, it is taken from there, so that no error adds up.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.progress import OnProgress
from dualform.rules import Rule, Seen, Settings
from dualform.store import Block, ParameterSteps, Store, gradient_from
from dualform.types import LayerInfo, Transition

from ..stream import DecodedSlots, StoreView, decoded

ROOM = 1 << 28
"""Bytes of preconditioners that are held at a time."""

SlotGroups = Callable[[Block], Int[np.ndarray, " m"]]
"""The group of each slot of a block; −1 for slots that are in none."""


@dataclass(frozen=True)
class ParameterState:
    """A parameter, the optimiser's buffer M of it, and the state that all examples share."""

    weight: Float[Tensor, "..."]
    buffer: Float[Tensor, "..."]
    shared: Mapping[str, Tensor] = field(default_factory=dict)

    def patch(self, of: Callable[[Tensor], Tensor]) -> "ParameterState":
        """Some entries of all of it."""
        return ParameterState(
            of(self.weight), of(self.buffer), {name: of(tensor) for name, tensor in self.shared.items()}
        )

    def to(self, dtype: torch.dtype) -> "ParameterState":
        """In another precision."""
        return self.patch(lambda tensor: tensor.to(dtype))


def advance(
    rule: Rule, t: Transition, settings: Settings, state: ParameterState, gradient: Float[Tensor, "..."], eps: float
) -> ParameterState:  # fmt: skip
    """One step of the optimiser: with its numbers, on a gradient as it finds it."""
    p, shared = precondition(rule, settings, state, gradient, eps)
    weight, buffer = after_step(rule, t, p, state.weight, state.buffer, gradient)
    return ParameterState(weight, buffer, shared)


def precondition(
    rule: Rule, settings: Settings, state: ParameterState, gradient: Float[Tensor, "..."], eps: float
) -> tuple[Tensor | None, Mapping[str, Tensor]]:
    """The map P of a step, and the shared state after it."""
    if rule.precondition is None:
        return None, state.shared
    shared = dict(state.shared)
    return rule.precondition(settings, shared, Seen(gradient, state.weight, state.buffer, eps)), shared


def after_step(
    rule: Rule, t: Transition, p: Tensor | None, weight: Tensor, buffer: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """W and M after a step, given P; of one part, or of several side by side."""
    weight, buffer = weight.clone(), buffer.clone()
    apply_step(rule, t, p, weight, buffer, gradient)
    return weight, buffer


def apply_step(rule: Rule, t: Transition, p: Tensor | None, weight: Tensor, buffer: Tensor, gradient: Tensor) -> None:
    """The same, in place: with many parts, new tensors would cost more than the sums."""
    push = None
    if p is not None and (t.wp or t.mp):
        inside = t.pg * gradient
        _add(inside, (t.pm, buffer), (t.pw, weight))
        push = inside.mul_(p) if rule.acts == "entries" else p @ inside
    before = weight.clone() if t.mw else None
    _add(_times(weight, t.ww), (t.wm, buffer), (t.wg, gradient), (t.wp, push))
    _add(_times(buffer, t.mm), (t.mw, before), (t.mg, gradient), (t.mp, push))


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else tensor.mul_(factor)


def _add(total: Tensor, *terms: tuple[float, Tensor | None]) -> None:
    for factor, term in terms:
        if factor and term is not None:
            total.add_(term, alpha=factor)


# ------------------------------------------------------------------------------------------- gradients from slots


class SlotGradients:
    """The gradients of some parameters, step by step, as the slots give them."""

    def __init__(self, store: Store, names: Iterable[str]) -> None:
        self.store, self.names = store, tuple(names)
        self.layers = [layer for layer in store.manifest.layers if set(layer.parameters) & set(self.names)]

    def at(self, step: int) -> Iterator[tuple[LayerInfo, DecodedSlots]]:
        """The slots of each layer that a step used."""
        for layer in self.layers:
            block = self.store.step_block(layer.name, step)
            if block is not None:
                yield layer, decoded(block, self.store.compute)

    def total(self, step: int) -> dict[str, Tensor]:
        """The whole gradient of each parameter."""
        out = {name: self._zeros(name) for name in self.names}
        for layer, slots in self.at(step):
            for name in layer.parameters:
                if name in out:
                    out[name] += gradient_of(layer, name, slots, self._shape(name))
        return out

    def split(self, step: int, group_of: SlotGroups, groups: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The whole gradient of each parameter, and those of its parts: the beginning has none, then each group."""
        whole = {name: self._zeros(name) for name in self.names}
        parts = {name: self._zeros(name, 1 + groups) for name in self.names}
        for layer, slots in self.at(step):
            group = group_of(slots.block)
            for number in np.unique(group):
                some = slots if (group == number).all() else slots.take(np.flatnonzero(group == number))
                for name in layer.parameters:
                    if name in whole:
                        part = gradient_of(layer, name, some, self._shape(name))
                        whole[name] += part
                        if number >= 0:
                            parts[name][1 + number] += part
        return whole, parts

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.store.parameters[name].shape

    def _zeros(self, name: str, *before: int) -> Tensor:
        return torch.zeros(*before, *self._shape(name), dtype=self.store.compute)


def gradient_of(layer: LayerInfo, name: str, slots: DecodedSlots, shape: Sequence[int]) -> Float[Tensor, "..."]:
    """What some slots put into the gradient of one parameter of their layer."""
    assert slots.errors is not None
    value = slots.factors(name)
    if name not in layer.weights:
        return _summed(slots, value)
    if slots.block.key_scale is not None:
        value = value * slots.block.key_scale
    return gradient_from(layer, name, slots.keys, slots.errors * value.unsqueeze(1), shape)


def _summed(slots: DecodedSlots, value: Float[Tensor, " m"]) -> Float[Tensor, " d_out"]:
    """The gradient of a bias, added up as autograd does it: call by call, row by row.

    A gradient may be zero but for the rounding of this very sum (the key bias of attention), and still move its bias,
    where a rule divides by its size.
    """
    assert slots.errors is not None
    _, sizes = np.unique(slots.block.call, return_counts=True)
    first, *others = [rows.sum(0) for rows in (slots.errors * value.unsqueeze(1)).split(sizes.tolist())]
    for other in others:
        first += other
    return first


# ------------------------------------------------------------------------------------------- forwards


class ParameterTrack:
    """One parameter on its way through the steps."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        rule = store.rule(name)
        assert rule is not None
        self.rule: Rule = rule
        self.eps = torch.finfo(getattr(torch, store.parameters[name].dtype)).eps
        self.state = first_state(store, name).to(store.compute)

    @cached_property
    def moves(self) -> ParameterSteps:
        """What the optimiser did to it."""
        return self.store.schedule(self.name)

    def step(self, step: int, gradient: Tensor) -> tuple[Transition, Tensor | None, float] | None:
        """Take a step: its numbers, its P and the scale of its gradient; None if the parameter did not move."""
        at = self.moves.find(step)
        if at is None:
            return None
        t, scale = Transition(*self.moves.transitions[at].tolist()), float(self.moves.scale[at])
        gradient = gradient * scale
        p, shared = precondition(self.rule, self.moves.settings_at(at), self.state, gradient, self.eps)
        weight, buffer = after_step(self.rule, t, p, self.state.weight, self.state.buffer, gradient)
        self.state = ParameterState(weight, buffer, shared)
        return t, p, scale

    def kept(self, step: int) -> ParameterState | None:
        """The whole state after a step, if it was kept."""
        return first_state(self.store, self.name) if step == 0 else kept_state(self.store, self.name, step)

    def look_up(self, step: int) -> None:
        """Go on from what was kept after a step, if it was."""
        kept = self.kept(step)
        if kept is not None:
            self.state = kept.to(self.store.compute)


def first_state(store: Store, name: str) -> ParameterState:
    """A parameter and the optimiser's state of it as recording began."""
    weight, shared = store.initial(name), store.initial_states(name)
    buffer = shared.pop("buffer", None)
    return ParameterState(weight, torch.zeros_like(weight) if buffer is None else buffer, shared)


def kept_state(store: Store, name: str, step: int) -> ParameterState | None:
    """A parameter and the optimiser's state of it after a step, if all of it was kept."""
    rule = store.rule(name)
    shared = {key: store.kept_at(f"{name}#{key}", step) for key in (rule.shared if rule else ())}
    shared = {key: tensor for key, tensor in shared.items() if tensor is not None}
    weight, buffer = store.kept_at(name, step), store.kept_at(f"{name}#buffer", step)
    if weight is None or rule is None or (rule.shared and not shared) or (not rule.shared and buffer is None):
        return None
    return ParameterState(weight, torch.zeros_like(weight) if buffer is None else buffer, shared)


def clusters(store: Store, names: Iterable[str]) -> list[list[str]]:
    """Parameters that are fed by the same layers, together: their slots are read once."""
    found: list[tuple[set[str], set[str]]] = []
    for name in names:
        layers = {layer.name for layer in store.manifest.layers if name in layer.parameters}
        mine = {name}
        for other in [each for each in found if each[1] & layers]:
            found.remove(other)
            mine, layers = mine | other[0], layers | other[1]
        found.append((mine, layers))
    order = {name: i for i, name in enumerate(store.parameters)}
    return [sorted(mine, key=order.__getitem__) for mine, _ in found]


@dataclass
class StateParts:
    """What a parameter and the optimiser's buffer of it are made of: (1 + groups, *shape), the beginning first."""

    weight: Float[Tensor, "..."]
    buffer: Float[Tensor, "..."]

    @property
    def initial(self) -> Float[Tensor, "..."]:
        """What is left of the beginning, in float64."""
        return self.weight[0].double()

    @property
    def groups(self) -> Float[Tensor, "..."]:
        """What each group put into it, in float64."""
        return self.weight[1:].double()


def replay(
    store: Store, names: Iterable[str], view: StoreView, *, group_of: SlotGroups | None = None, groups: int = 1,
    watch: OnProgress | None = None,
) -> dict[str, StateParts]:  # fmt: skip
    """Run the steps up to the horizon again, and split parameters by groups of slots (one group: all that is shown)."""
    out: dict[str, StateParts] = {}
    grouped = _shown_groups(view, group_of)
    for cluster in clusters(store, names):
        gradients = SlotGradients(store, cluster)
        tracks = {name: ParameterTrack(store, name) for name in cluster}
        parts = {name: _begin(track.state, groups) for name, track in tracks.items()}
        for step in range(1, view.horizon + 1):
            if grouped is None:
                whole = gradients.total(step)
                split = {name: torch.stack([torch.zeros_like(g), g]) for name, g in whole.items()}
            else:
                whole, split = gradients.split(step, grouped, groups)
            for name, track in tracks.items():
                found = track.step(step, whole[name])
                if found is not None:
                    t, p, scale = found
                    apply_step(track.rule, t, p, parts[name].weight, parts[name].buffer, split[name].mul_(scale))
                track.look_up(step)
            if watch:
                watch(sum(store.step_rows(layer.name, step) for layer in gradients.layers))
        out |= parts
    return out


def _begin(state: ParameterState, groups: int) -> StateParts:
    none = state.weight.new_zeros(groups, *state.weight.shape)
    return StateParts(torch.cat([state.weight.unsqueeze(0), none]), torch.cat([state.buffer.unsqueeze(0), none]))


def _shown_groups(view: StoreView, group_of: SlotGroups | None) -> SlotGroups | None:
    if group_of is None and view.visible is None:
        return None

    def grouped(block: Block) -> Int[np.ndarray, " m"]:
        group = np.zeros(len(block.slots), np.int64) if group_of is None else group_of(block)
        if view.visible is not None:
            group = np.where(np.append(view.visible, True)[block.visits], group, -1)
        return group

    return grouped


def state_at(store: Store, names: Iterable[str], step: int) -> dict[str, ParameterState]:
    """Parameters and the optimiser's state of them after a step, from their first state and the slots alone."""
    out: dict[str, ParameterState] = {}
    for cluster in clusters(store, names):
        gradients, tracks = SlotGradients(store, cluster), {name: _track(store, name) for name in cluster}
        for s in range(1, step + 1):
            whole = gradients.total(s)
            for name, track in tracks.items():
                track.step(s, whole[name])
        out |= {name: track.state for name, track in tracks.items()}
    return out


def _track(store: Store, name: str) -> ParameterTrack:
    track = ParameterTrack(store, name)
    track.state = track.state.to(torch.float64)
    return track


# ------------------------------------------------------------------------------------------- backwards

Factor = float | Tensor
"""What a part of the past counts for: a number, one for each entry, or a matrix from the left."""


def backward_factors(store: Store, layer: LayerInfo, horizon: int) -> Iterator[tuple[int, dict[str, Factor]]]:
    r"""What the gradient of each step counts for in the weights of a layer at the horizon, from the last step down.

    .. math:: W_h = \ldots + \sum_s C_s(h)\, G_s

    Carried is the row :math:`[w\; m]` that begins as [1 0]: what W and M after a step count for at the horizon.
    """
    tracks = {name: ParameterTrack(store, name) for name in layer.weights if store.parameters[name].by_slots}
    carried: dict[str, tuple[Factor, Factor]] = dict.fromkeys(tracks, (1.0, 0.0))
    for begin, end in reversed(list(pairwise(_stations(store, tracks, horizon)))):
        for steps in _forwards(store, tracks, begin, end):
            for step, found in steps:
                out: dict[str, Factor] = {}
                for name, (t, p, scale) in found.items():
                    c, carried[name] = _back(tracks[name].rule, t, p, *carried[name])
                    out[name] = c * scale
                yield step, out


def _back(rule: Rule, t: Transition, p: Tensor | None, w: Factor, m: Factor) -> tuple[Factor, tuple[Factor, Factor]]:
    """One step back: what its gradient counts for, and W and M before it."""
    c = _mixed(t.wg, w, t.mg, m)
    before = (_mixed(t.ww, w, t.mw, m), _mixed(t.wm, w, t.mm, m))
    if p is None or not (t.wp or t.mp):
        return c, before
    q = _mixed(t.wp, w, t.mp, m)
    push = p * q if rule.acts == "entries" or not isinstance(q, Tensor) else q @ p
    if rule.acts == "left":  # numbers stand for multiples of the unit matrix
        c, before = _matrix(c, push), tuple(_matrix(each, push) for each in before)
    return (
        c + push * t.pg,
        (before[0] + push * t.pw if t.pw else before[0], before[1] + push * t.pm if t.pm else before[1]),
    )


def _mixed(a: float, w: Factor, b: float, m: Factor) -> Factor:
    """a w + b m: products of whole matrices with zero are left out."""
    if not b:
        return a * w if a else 0.0
    return a * w + b * m if a else b * m


def _matrix(factor: Factor, like: Tensor) -> Tensor:
    if isinstance(factor, Tensor):
        return factor
    return factor * torch.eye(len(like), dtype=like.dtype)


def _stations(store: Store, tracks: Mapping[str, ParameterTrack], horizon: int) -> list[int]:
    """The steps after which all of the state is known, up to the horizon; and the horizon."""
    known = [s for s in store.kept_steps if s < horizon and all(track.kept(s) is not None for track in tracks.values())]
    return [0, *known, horizon] if horizon else [0]


StepStream = Iterable[tuple[int, dict[str, tuple[Transition, Tensor | None, float]]]]


def _forwards(store: Store, tracks: Mapping[str, ParameterTrack], begin: int, end: int) -> Iterator[StepStream]:
    """The numbers and preconditioners of the steps after ``begin`` up to ``end``, last first, as many as there is room
    for at a time.
    """
    gradients = SlotGradients(store, tracks)
    for track in tracks.values():
        track.look_up(begin)
    size = sum(store.parameters[name].size for name in tracks) * store.compute.itemsize
    at_a_time = max(1, ROOM // max(1, size))
    cuts = [*range(begin, end, at_a_time), end]
    states = [{name: track.state for name, track in tracks.items()}]
    for first, last in list(pairwise(cuts))[:-1]:
        _run(gradients, tracks, first, last, keep=False)
        states.append({name: track.state for name, track in tracks.items()})
    for (first, last), state in zip(reversed(list(pairwise(cuts))), reversed(states), strict=True):
        for name, track in tracks.items():
            track.state = state[name]
        yield reversed(_run(gradients, tracks, first, last, keep=True))


def _run(gradients: SlotGradients, tracks: Mapping[str, ParameterTrack], begin: int, end: int, keep: bool) -> list:
    found = []
    for step in range(begin + 1, end + 1):
        whole = gradients.total(step)
        steps = {name: move for name, track in tracks.items() if (move := track.step(step, whole[name])) is not None}
        if keep:
            found.append((step, steps))
    return found
