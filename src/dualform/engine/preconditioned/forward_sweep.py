"""Training run again from the slots, forwards up to a horizon."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.rules import Rule
from dualform.store import Block, ParameterSteps, Store
from dualform.types import Transition

from ..layer_progress import LayerProgress
from ..stream import StoreView
from .recurrence import ParameterState, after_step, apply_step, precondition
from .slot_gradients import SlotGradients, SlotGroups


class ParameterTrack:
    """One parameter and its optimiser state, run forwards step by step."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        rule = store.rule(name)
        assert rule is not None
        self.rule: Rule = rule
        self.eps = torch.finfo(getattr(torch, store.parameters[name].dtype)).eps
        self.state = initial_state(store, name).to(store.compute)
        self.only_preconditioners = False
        """Whether W and M may be left behind, as only the map P of each step is asked for and it does not read them."""

    @cached_property
    def changes(self) -> ParameterSteps:
        """The steps that changed it."""
        return self.store.schedule(self.name)

    def step(self, step: int, gradient: Tensor) -> tuple[Transition, Tensor | None, float] | None:
        """Take a step; returns its transition, P and gradient scale, or None if it did not change the parameter."""
        index = self.changes.find(step)
        if index is None:
            return None
        t, scale = Transition(*self.changes.transitions[index].tolist()), float(self.changes.scale[index])
        gradient = gradient * scale
        p, shared = precondition(self.rule, self.changes.settings_at(index), self.state, gradient, self.eps)
        weight, buffer = self.state.weight, self.state.buffer
        if not self.only_preconditioners:
            weight, buffer = after_step(self.rule, t, p, weight, buffer, gradient)
        self.state = ParameterState(weight, buffer, shared)
        return t, p, scale

    def ask_for_preconditioners(self) -> None:
        """From now on, leave W and M behind where P does not read them."""
        decay = [Transition._fields.index(name) for name in ("mw", "pw")]
        self.only_preconditioners = self.rule.reads_gradients and not self.changes.transitions[:, decay].any()

    def known_state(self, step: int) -> ParameterState | None:
        """The whole state after a step, if it is the initial one or was stored."""
        return initial_state(self.store, self.name) if step == 0 else stored_state(self.store, self.name, step)

    def load_stored_state(self, step: int) -> None:
        """Continue from the state that was stored after a step, if there is one."""
        stored = self.known_state(step)
        if stored is not None:
            self.state = stored.to(self.store.compute)


def initial_state(store: Store, name: str) -> ParameterState:
    """A parameter and its optimiser state when recording began."""
    weight, shared = store.initial(name), store.initial_states(name)
    buffer = shared.pop("buffer", None)
    return ParameterState(weight, torch.zeros_like(weight) if buffer is None else buffer, shared)


def stored_state(store: Store, name: str, step: int) -> ParameterState | None:
    """A parameter and its optimiser state after a step, if all of it was stored."""
    rule = store.rule(name)
    shared = {key: store.kept_at(f"{name}#{key}", step) for key in (rule.shared if rule else ())}
    shared = {key: tensor for key, tensor in shared.items() if tensor is not None}
    weight, buffer = store.kept_at(name, step), store.kept_at(f"{name}#buffer", step)
    if weight is None or rule is None or (rule.shared and not shared) or (not rule.shared and buffer is None):
        return None
    return ParameterState(weight, torch.zeros_like(weight) if buffer is None else buffer, shared)


def clusters(store: Store, names: Iterable[str]) -> list[list[str]]:
    """Groups of parameters that share layers, so that the slots of a layer are read only once; one group of all where a
    pass over the slots runs training again.
    """
    names = list(names)
    if store.is_supplied:
        return [names] if names else []
    clustered: list[tuple[set[str], set[str]]] = []
    for name in names:
        layers = {layer.name for layer in store.manifest.layers if name in layer.parameters}
        members = {name}
        for cluster in [cluster for cluster in clustered if cluster[1] & layers]:
            clustered.remove(cluster)
            members, layers = members | cluster[0], layers | cluster[1]
        clustered.append((members, layers))
    order = {name: i for i, name in enumerate(store.parameters)}
    return [sorted(members, key=order.__getitem__) for members, _ in clustered]


@dataclass
class StateParts:
    """A parameter and its optimiser buffer as sums of parts, each (1 + groups, *shape): first the initial state."""

    weight: Float[Tensor, "..."]
    buffer: Float[Tensor, "..."]

    @property
    def initial(self) -> Float[Tensor, "..."]:
        """What is left of the initial weights, in float64."""
        return self.weight[0].double()

    @property
    def groups(self) -> Float[Tensor, "..."]:
        """The part of each group, in float64."""
        return self.weight[1:].double()


def rerun_from_slots(
    store: Store, names: Iterable[str], view: StoreView, *, group_of: SlotGroups | None = None, groups: int = 1,
    progress: LayerProgress | None = None,
) -> dict[str, StateParts]:  # fmt: skip
    """Run the steps up to the horizon again and split parameters by groups of visible slots (by default one group)."""
    out: dict[str, StateParts] = {}
    grouped = _visible_groups(view, group_of)
    for cluster in clusters(store, names):
        gradients = SlotGradients(store, cluster)
        watch = progress.of(gradients.layers) if progress is not None else None
        tracks = {name: ParameterTrack(store, name) for name in cluster}
        parts = {name: _initial_parts(track.state, groups) for name, track in tracks.items()}
        for step in range(1, view.horizon + 1):
            if grouped is None:
                totals = gradients.total(step)
                split = {name: torch.stack([torch.zeros_like(g), g]) for name, g in totals.items()}
            else:
                totals, split = gradients.split(step, grouped, groups)
            for name, track in tracks.items():
                change = track.step(step, totals[name])
                if change is not None:
                    t, p, scale = change
                    apply_step(track.rule, t, p, parts[name].weight, parts[name].buffer, split[name].mul_(scale))
                track.load_stored_state(step)
            if watch:
                watch(sum(store.step_rows(layer.name, step) for layer in gradients.layers))
        out |= parts
    return out


def _initial_parts(state: ParameterState, groups: int) -> StateParts:
    zeros = state.weight.new_zeros(groups, *state.weight.shape)
    return StateParts(torch.cat([state.weight.unsqueeze(0), zeros]), torch.cat([state.buffer.unsqueeze(0), zeros]))


def _visible_groups(view: StoreView, group_of: SlotGroups | None) -> SlotGroups | None:
    if group_of is None and view.visible is None:
        return None

    def grouped(block: Block) -> Int[np.ndarray, " m"]:
        group = np.zeros(len(block.slots), np.int64) if group_of is None else group_of(block)
        if view.visible is not None:
            group = np.where(np.append(view.visible, True)[block.visits], group, -1)
        return group

    return grouped


def state_at(store: Store, names: Iterable[str], step: int) -> dict[str, ParameterState]:
    """Parameters and their optimiser states after a step, in float64, from the initial state and the slots only."""
    out: dict[str, ParameterState] = {}
    for cluster in clusters(store, names):
        gradients, tracks = SlotGradients(store, cluster), {name: _float64_track(store, name) for name in cluster}
        for s in range(1, step + 1):
            totals = gradients.total(s)
            for name, track in tracks.items():
                track.step(s, totals[name])
        out |= {name: track.state for name, track in tracks.items()}
    return out


def _float64_track(store: Store, name: str) -> ParameterTrack:
    track = ParameterTrack(store, name)
    track.state = track.state.to(torch.float64)
    return track
