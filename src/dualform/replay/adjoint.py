r"""Influence through training: how a target of the trained network depends on the weight of each example in the loss.

Training is :math:`\theta_t, s_t = \mathrm{step}_t(\theta_{t-1}, s_{t-1}, G_t)` with
:math:`G_t = \nabla_\theta \sum_i w_i \ell_i(\theta_{t-1})` and all :math:`w_i = 1`; s is the optimiser's state and the
model's buffers. The adjoint :math:`\lambda` of the target φ is carried back from the last step to the first:

.. math::
    v_t &= (\partial\,\mathrm{step}_t / \partial G_t)^\top \lambda_t \\
    \mathrm{influence}_i &\mathrel{+}= \langle v_t, \nabla_\theta \ell_i(\theta_{t-1}) \rangle \\
    \lambda_{t-1} &= (\partial\,\mathrm{step}_t / \partial(\theta, s))^\top \lambda_t + H_t v_t

H is the Hessian of the batch loss. One double backward of :math:`\langle v_t, G_t\rangle` gives :math:`H_t v_t` and the
influence of every example at once, for all targets side by side. Leaving example i out of *this* run (same order, same
random numbers) changes φ by about minus its influence.

The *direct* kind leaves out H and holds what all examples share (the preconditioner, the clip factor, the buffers) at
its recorded value. That is the direct contribution of an example, summed over all parameters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dualform.progress import OnProgress

from .pass_graph import differentiable_twice, normalised_by, statistics_of, undivided
from .rerun import PassTrace, Rerun
from .simplifications import Simplifications
from .step_adjoint import Adjoint, Slopes, slopes_of, through_the_step
from .traced_run import TracedStep, bytes_of_a_step, traced

InfluenceKind = Literal["through training", "direct"]

BUFFERS = "#buffers"
"""Where an adjoint holds what belongs to the model's own buffers."""

BUDGET = 2 << 30
"""Bytes of memory for adjoints, and as many again for the steps of a stretch, where the caller does not say."""

SIDE_BY_SIDE = 1 << 20
"""The entries of all adjoints that are carried through a pass together: what a processor's cache can hold."""


@dataclass(frozen=True)
class Influences:
    """Of each visit, in the order in which the memory numbers them: its step, its example, its influence on queries."""

    steps: Int[Tensor, " visits"]
    index: Int[Tensor, " visits"]
    values: Float[Tensor, "queries visits"]
    simplified: Simplifications
    """What it leaves out, or takes one side of."""

    def by_example(self, examples: int) -> Float[Tensor, "queries examples"]:
        """All visits of an example together."""
        return self.values.new_zeros(len(self.values), examples).index_add_(1, self.index, self.values)


Targets = Callable[[nn.Module], Float[Tensor, " queries"]]


def influences(
    rerun: Rerun,
    targets: Targets,
    states: Sequence[Mapping[str, Any]],
    kinds: Sequence[InfluenceKind] = ("through training",),
    *,
    budget: int = BUDGET,
    watch: Callable[[int], OnProgress | None] | None = None,
) -> list[Influences]:
    """The influence of every visit on each of the ``targets``, which are functions of the trained model.

    ``states`` are kept ones (of :meth:`Rerun.state`), the first of them at step 0. The stretches between them run
    again, the last one first. Queries whose adjoints do not fit into the ``budget`` of bytes together are carried back
    one chunk after the other. ``watch`` makes, of the number of steps in all, a function that counts them.
    """
    rerun.load(states[-1])
    rerun.run(len(rerun.steps))
    queries = len(_values_of(targets, rerun.model))
    chunk = max(1, min(queries, budget // (len(kinds) * _bytes_of_adjoint(rerun))))
    chunks = [slice(first, min(first + chunk, queries)) for first in range(0, queries, chunk)]
    on_step = None if watch is None else watch(len(rerun.steps) * len(chunks))
    parts = []
    simplified = Simplifications()
    for rows in chunks:
        parts.append(_influences_of_chunk(rerun, targets, rows, states, kinds, budget, on_step, simplified))
    steps, index = parts[0].steps, parts[0].index
    values = [torch.cat([part.values[place] for part in parts]) for place in range(len(kinds))]
    answers = []
    for kind, of_kind in zip(kinds, values, strict=True):
        own = simplified if kind == "through training" else Simplifications()
        own.look_at(steps, of_kind)
        answers.append(Influences(steps, index, of_kind, own))
    return answers


@dataclass(frozen=True)
class ChunkOfInfluences:
    """The influences of some queries, one tensor for each kind."""

    steps: Int[Tensor, " visits"]
    index: Int[Tensor, " visits"]
    values: Sequence[Float[Tensor, "queries visits"]]


def _influences_of_chunk(
    rerun: Rerun,
    targets: Targets,
    rows: slice,
    states: Sequence[Mapping[str, Any]],
    kinds: Sequence[InfluenceKind],
    budget: int,
    on_step: OnProgress | None,
    simplified: Simplifications,
) -> ChunkOfInfluences:
    rerun.load(states[-1])
    rerun.run(len(rerun.steps))
    carried = [
        CarriedBack(kind == "direct", _adjoint_of_targets(rerun, targets, rows, kind == "direct")) for kind in kinds
    ]
    passes: list[tuple[int, PassTrace]] = []
    for step in _steps_back(rerun, states, budget):
        simplified.add(step)
        for back in carried:
            back.through(rerun, step)
        passes += [(step.number, one_pass) for one_pass in reversed(step.trace.passes)]
        if on_step is not None:
            on_step(1)
    passes.reverse()
    steps = torch.cat([torch.full_like(one_pass.index, number) for number, one_pass in passes])
    index = torch.cat([one_pass.index for _, one_pass in passes])
    visits = torch.cat([one_pass.first + torch.arange(len(one_pass.index)) for _, one_pass in passes])
    order = visits.argsort()
    return ChunkOfInfluences(steps[order], index[order], [back.values[:, order] for back in carried])


class CarriedBack:
    """The adjoint of some targets, at the step where the way back stands, and the influences found so far.

    It is held in groups of queries that are small enough for the processor's cache.
    """

    def __init__(self, direct: bool, adjoint: Adjoint) -> None:
        self.direct = direct
        queries = self._queries = len(next(iter(adjoint.values()))["weight"])
        size = max(1, SIDE_BY_SIDE // _entries_of_a_query(adjoint))
        self._groups = [_rows_of(adjoint, slice(first, first + size)) for first in range(0, queries, size)]
        self._influence: list[list[Tensor]] = [[] for _ in self._groups]

    @property
    def values(self) -> Float[Tensor, "queries visits"]:
        """The influence of every visit, in the order of training."""
        return torch.cat([torch.cat(lines[::-1], dim=1) for lines in self._influence])

    def through(self, rerun: Rerun, step: TracedStep) -> None:
        """Go back by one step."""
        rerun.set_modes(step.trace.modes)
        slopes = slopes_of(step.steps, held=self.direct, queries=self._queries)
        for place, group in enumerate(self._groups):
            self._groups[place] = self._group_through(rerun, step, group, slopes, self._influence[place])

    def _group_through(
        self, rerun: Rerun, step: TracedStep, adjoint: Adjoint, slopes: Mapping[str, Slopes], lines: list[Tensor]
    ) -> Adjoint:
        before, pull = through_the_step(step.steps, step.gradients, step.scaling, adjoint, slopes, held=self.direct)
        for name, tensors in adjoint.items():
            before.setdefault(name, tensors)
        buffers, queries = dict(adjoint[BUFFERS]), next(len(tensors["weight"]) for tensors in adjoint.values())
        for place in range(len(step.trace.passes) - 1, -1, -1):
            pulled = step.graph(rerun, place).pull(pull, buffers, queries=queries, curved=not self.direct)
            for name, tensor in pulled.weights.items():
                if name in before:
                    before[name]["weight"] += tensor
            buffers = pulled.buffers
            lines.append(pulled.influence)
        before[BUFFERS] = buffers
        return before


# ---------------------------------------------------------------------------------------------------- the targets


def _values_of(targets: Targets, model: nn.Module) -> Float[Tensor, " queries"]:
    """The targets in evaluation mode."""
    with _evaluating(model), torch.no_grad():
        return targets(model)


def _adjoint_of_targets(rerun: Rerun, targets: Targets, rows: slice, direct: bool) -> Adjoint:
    """∂φ/∂θ and ∂φ/∂(buffers) at the end of training, in evaluation mode, of some of the targets."""
    model = rerun.model
    buffers = {} if direct else {name: buffer.clone().requires_grad_() for name, buffer in statistics_of(model).items()}
    parameters = rerun.trained_parameters()
    leaves = [*parameters.values(), *buffers.values()]
    with _evaluating(model), undivided(model), _with_gradients(parameters.values()), differentiable_twice(model):
        with torch.enable_grad(), normalised_by(model, buffers):
            values = targets(model)[rows]
        found = [torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True) for value in values]
    stacked = [torch.stack(column) for column in zip(*found, strict=True)]
    adjoint: Adjoint = {name: {"weight": value} for name, value in zip(parameters, stacked, strict=False)}
    adjoint[BUFFERS] = dict(zip(buffers, stacked[len(parameters) :], strict=True))
    return adjoint


@contextmanager
def _with_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Parameters that were trained take gradients, also those that are frozen at the end."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block, and then every module in its own mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


# ---------------------------------------------------------------------------------------------------- the way back


def _steps_back(rerun: Rerun, states: Sequence[Mapping[str, Any]], budget: int) -> Iterator[TracedStep]:
    """All steps with what they read, from the last to the first."""
    rerun.load(states[0])
    without, with_graphs = bytes_of_a_step(rerun)
    end = len(rerun.steps)
    longest = max(b["position"] - a["position"] for a, b in zip(states, [*states[1:], {"position": end}], strict=True))
    graphs = 4 * (budget // with_graphs) >= longest  # halving a stretch twice costs less than making graphs again
    length = max(1, budget // (with_graphs if graphs else without))
    for state in reversed(states):
        yield from _stretch_back(rerun, state, end, length, graphs)
        end = state["position"]


def _stretch_back(rerun: Rerun, state: Mapping[str, Any], end: int, length: int, graphs: bool) -> Iterator[TracedStep]:
    """The steps from a state to ``end``, the last one first; halves what is longer than ``length`` steps."""
    rerun.load(state)
    if end - state["position"] > length:
        middle = (state["position"] + end) // 2
        rerun.run(middle)
        yield from _stretch_back(rerun, rerun.state(), end, length, graphs)
        yield from _stretch_back(rerun, state, middle, length, graphs)
        return
    stretch = list(traced(rerun, end, graphs=graphs))
    while stretch:
        yield stretch.pop()


def _bytes_of_adjoint(rerun: Rerun) -> int:
    """The bytes of one query: its adjoint of weights and of the optimiser's state, and as much again while at work."""
    total = 0
    for optimizer, rule in zip(rerun.optimizers, rerun.rules, strict=True):
        for group in optimizer.param_groups:
            total += sum(parameter.nbytes * (1 + len(rule.state)) for parameter in group["params"])
    return 2 * max(total, 1)


def _entries_of_a_query(adjoint: Adjoint) -> int:
    return max(1, sum(tensor[0].numel() for tensors in adjoint.values() for tensor in tensors.values()))


def _rows_of(adjoint: Adjoint, rows: slice) -> Adjoint:
    return {name: {key: tensor[rows].clone() for key, tensor in tensors.items()} for name, tensors in adjoint.items()}
