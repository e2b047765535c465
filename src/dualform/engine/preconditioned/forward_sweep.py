"""Training run again from the slots, forwards up to a horizon."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.progress import OnProgress
from dualform.rules import Rule
from dualform.store import Block, ParameterSteps, Store
from dualform.types import Transition

from ..stream import StoreView
from .recurrence import ParameterState, after_step, apply_step, precondition
from .slot_gradients import SlotGradients, SlotGroups


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


def rerun_from_slots(
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
