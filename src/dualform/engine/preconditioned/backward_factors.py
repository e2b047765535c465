"""The factor of each step's gradient in the weights at a horizon, from the last step down to the first."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from itertools import pairwise

import torch
from torch import Tensor

from dualform.rules import Rule
from dualform.store import Store
from dualform.types import Transition

from .forward_sweep import ParameterTrack
from .slot_gradients import SlotGradients

PRECONDITIONER_BYTES = 1 << 28
"""The most bytes of preconditioners that are in memory at a time."""


Factor = float | Tensor
"""The factor of a gradient or a state: a number, a number for each entry, or a matrix that multiplies from the left."""


def backward_factors(
    store: Store,
    names: Iterable[str],
    horizon: int,
    initial: MutableMapping[str, tuple[Factor, Factor]] | None = None,
) -> Iterator[tuple[int, dict[str, Factor]]]:
    r"""The factors C of each step's gradient in some parameters at the horizon, from the last step down.

    .. math:: W_h = A\, W_0 + B\, M_0 + \sum_s C_s(h)\, G_s

    The sweep carries the row :math:`[w\; m]`, which begins as [1 0]: the factors of W and M after a step in the weights
    at the horizon. When all steps were asked for, ``initial`` holds what it has become: A and B.
    """
    tracks = {name: ParameterTrack(store, name) for name in names if store.parameters[name].by_slots}
    for track in tracks.values():
        track.ask_for_preconditioners()
    carried: dict[str, tuple[Factor, Factor]] = dict.fromkeys(tracks, (1.0, 0.0))
    for begin, end in reversed(list(pairwise(_known_steps(store, tracks, horizon)))):
        for steps in _step_stretches(store, tracks, begin, end):
            for step, changes in steps:
                out: dict[str, Factor] = {}
                for name, (t, p, scale) in changes.items():
                    c, carried[name] = _step_back(tracks[name].rule, t, p, *carried[name])
                    out[name] = c if scale == 1.0 else c * scale
                yield step, out
    if initial is not None:
        initial.update(carried)


def _step_back(
    rule: Rule, t: Transition, p: Tensor | None, w: Factor, m: Factor
) -> tuple[Factor, tuple[Factor, Factor]]:
    """One step back: the factor of its gradient, and the factors of W and M before it."""
    c = _mixed(t.wg, w, t.mg, m)
    before = (_mixed(t.ww, w, t.mw, m), _mixed(t.wm, w, t.mm, m))
    if p is None or not (t.wp or t.mp):
        return c, before
    q = _mixed(t.wp, w, t.mp, m)
    effect = p * q if rule.acts == "entries" or not isinstance(q, Tensor) else q @ p
    if rule.acts == "left":  # a number means a multiple of the unit matrix
        c, before = _matrix(c, effect), tuple(_matrix(factor, effect) for factor in before)
    return (
        c + effect * t.pg,
        (before[0] + effect * t.pw if t.pw else before[0], before[1] + effect * t.pm if t.pm else before[1]),
    )


def _mixed(a: float, w: Factor, b: float, m: Factor) -> Factor:
    """a w + b m, without products of matrices with zero."""
    if not b:
        return a * w if a else 0.0
    return a * w + b * m if a else b * m


def _matrix(factor: Factor, like: Tensor) -> Tensor:
    if isinstance(factor, Tensor):
        return factor
    return factor * torch.eye(len(like), dtype=like.dtype)


def _known_steps(store: Store, tracks: Mapping[str, ParameterTrack], horizon: int) -> list[int]:
    """The steps before the horizon after which the whole state is stored, and the horizon."""
    stored = [
        s
        for s in store.kept_steps
        if s < horizon and all(track.known_state(s) is not None for track in tracks.values())
    ]
    return [0, *stored, horizon] if horizon else [0]


StepStream = Iterable[tuple[int, dict[str, tuple[Transition, Tensor | None, float]]]]


def _step_stretches(store: Store, tracks: Mapping[str, ParameterTrack], begin: int, end: int) -> Iterator[StepStream]:
    """The transitions and preconditioners of the steps after ``begin`` up to ``end``, the last step first.

    They come in stretches of as many steps as fit into memory.
    """
    gradients = SlotGradients(store, tracks)
    for track in tracks.values():
        track.load_stored_state(begin)
    size = sum(store.parameters[name].size for name in tracks) * store.compute.itemsize
    at_a_time = max(1, PRECONDITIONER_BYTES // max(1, size))
    cuts = [*range(begin, end, at_a_time), end]
    states = [{name: track.state for name, track in tracks.items()}]
    for first, last in list(pairwise(cuts))[:-1]:
        _run_steps(gradients, tracks, first, last, keep=False)
        states.append({name: track.state for name, track in tracks.items()})
    for (first, last), state in zip(reversed(list(pairwise(cuts))), reversed(states), strict=True):
        for name, track in tracks.items():
            track.state = state[name]
        yield reversed(_run_steps(gradients, tracks, first, last, keep=True))


def _run_steps(
    gradients: SlotGradients, tracks: Mapping[str, ParameterTrack], begin: int, end: int, keep: bool
) -> list:
    changes = []
    for step in range(begin + 1, end + 1):
        totals = gradients.total(step)
        steps = {
            name: change for name, track in tracks.items() if (change := track.step(step, totals[name])) is not None
        }
        if keep:
            changes.append((step, steps))
    return changes
