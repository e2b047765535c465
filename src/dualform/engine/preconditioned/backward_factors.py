"""What the gradient of each step counts for in the weights at a horizon, from the last step down to the first."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from dualform.rules import Rule
from dualform.store import Store
from dualform.types import LayerInfo, Transition

from .forward_sweep import ParameterTrack
from .slot_gradients import SlotGradients

ROOM = 1 << 28
"""Bytes of preconditioners that are held at a time."""


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
