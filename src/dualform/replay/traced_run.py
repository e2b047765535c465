"""Steps that are taken again and held, with all that the adjoint of a step needs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualform.rules import Rule, Settings

from .model_copy import LooseValues, loose_values, restore_loose_values
from .pass_graph import PassGraph, SavedBytes, build_graph, statistics_of
from .rerun import PassTrace, Rerun, StepTrace
from .step_adjoint import GRADIENT, JointStep, Scaling, has_slopes

SMALL = 1 << 16
"""Entries of a parameter for which the cost of an operation is not that of reading them."""


@dataclass(frozen=True)
class TracedStep:
    """A step that was taken again: all that it read."""

    number: int
    trace: StepTrace
    steps: Sequence[JointStep]
    """The steps of the parameters that took one."""
    weights: Mapping[str, Tensor]
    """The parameters that take gradients, before the step, as leaves of the graphs."""
    fixed: Mapping[str, Tensor]
    """The other parameters; those that took gradients in an earlier step are leaves too."""
    gradients: Mapping[str, Tensor]
    """The summed gradients as backprop gave them, where clipping makes each depend on all of them."""
    scaling: Scaling
    buffers: Sequence[Mapping[str, Tensor]]
    """The model's buffers before each pass."""
    graphs: Sequence[PassGraph | None]
    """The passes, ready to be differentiated once more, where memory allows to keep them."""
    loose: Sequence[LooseValues]
    """The model's own numbers and tensors before each pass."""
    settled: frozenset[str]
    """The modules that only read running statistics which they changed in an earlier step."""
    own_buffers: frozenset[str]
    """The buffers that changed, and that the adjoint does not know how to follow."""

    def graph(self, rerun: Rerun, place: int) -> PassGraph:
        """One of its passes, ready to be differentiated once more."""
        kept = self.graphs[place]
        if kept is not None:
            return kept
        restore_loose_values(rerun.model, self.loose[place])
        one_pass, buffers = self.trace.passes[place], self.buffers[place]
        return build_graph(rerun, one_pass, self.weights, self.fixed, buffers, self.settled)

    @property
    def tensor_bytes(self) -> int:
        """The bytes of its tensors, without those of the graphs."""
        tensors = [*self.weights.values(), *self.fixed.values(), *self.gradients.values()]
        tensors += [tensor for buffers in self.buffers for tensor in buffers.values()]
        tensors += [tensor for step in self.steps for tensor in step.tensors.values()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def traced(rerun: Rerun, end: int, *, graphs: bool) -> Iterator[TracedStep]:
    """Run up to a step, and give what each of the steps read, with its ``graphs`` or without."""
    while rerun.position < end:
        yield _traced_step(rerun, graphs)


def bytes_of_a_step(rerun: Rerun) -> tuple[int, int]:
    """The bytes that a traced step takes here, without its graphs and with them. The run goes on by one step."""
    step = next(traced(rerun, rerun.position + 1, graphs=False))
    saved = SavedBytes()
    with saved:
        for place in range(len(step.trace.passes)):
            step.graph(rerun, place)
    return step.tensor_bytes, step.tensor_bytes + saved.total


def _traced_step(rerun: Rerun, with_graphs: bool) -> TracedStep:
    trace = rerun.begin_step()
    model = rerun.model
    parameters = rerun.parameters
    weights = {name: p.detach().clone().requires_grad_() for name, p in parameters.items() if p.requires_grad}
    fixed = {name: p.detach().clone() for name, p in parameters.items() if not p.requires_grad}
    for name in rerun.frozen_since(rerun.position + 1):
        fixed[name].requires_grad_()
    settled = frozenset(rerun.evaluating_since(rerun.position + 1))
    buffers, passes, graphs, loose, own_buffers = [], [], [], [], set()
    for one_pass in trace.passes:
        buffers.append({name: tensor.clone() for name, tensor in model.named_buffers()})
        loose.append(loose_values(model, buffers=False))
        passes.append(_with_generator(one_pass))
        if with_graphs:
            graphs.append(build_graph(rerun, passes[-1], weights, fixed, buffers[-1], settled))
            _leave_model_as_after(rerun, graphs[-1], parameters)
        else:
            rerun.backward(one_pass)
            graphs.append(None)
        own_buffers |= _own_buffers_changed(model, buffers[-1])
    trace = replace(trace, passes=tuple(passes))
    clip_norm, factor = rerun.scaling_of(trace)
    gradients = {}
    if clip_norm is not None:
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm()) if gradients else 0.0
    scaling = Scaling(factor, clip_norm, norm)
    steps = _steps_of(rerun, trace, scaling.value)
    rerun.end_step(trace, clip_norm, factor)
    return TracedStep(
        rerun.position, trace, steps, weights, fixed, gradients, scaling, buffers, graphs, loose, settled,
        frozenset(own_buffers),
    )  # fmt: skip


def _own_buffers_changed(model: nn.Module, before: Mapping[str, Tensor]) -> set[str]:
    """The buffers that a pass has changed, but for statistics of normalisations and counters."""
    followed = statistics_of(model)
    return {
        name
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point()
        and name not in followed
        and not (name in before and torch.equal(buffer, before[name]))
    }


def _leave_model_as_after(rerun: Rerun, graph: PassGraph, parameters: Mapping[str, Tensor]) -> None:
    """What a backward pass leaves behind: gradients that add up, and buffers."""
    for name, value in graph.gradient.items():
        parameter, gradient = parameters[name], value.detach()
        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
    if graph.buffers:
        for name, buffer in rerun.model.named_buffers():
            buffer.copy_(graph.buffers[name])


def _with_generator(one_pass: PassTrace) -> PassTrace:
    """The pass with the state of the generator with which it is about to run."""
    return one_pass if one_pass.generator is not None else replace(one_pass, generator=torch.get_rng_state())


def _steps_of(rerun: Rerun, trace: StepTrace, factor: float) -> list[JointStep]:
    """What the step is about to read, copied. Small parameters that take the same step are joined, as every operation
    has a cost of its own."""
    alike: dict[Any, list[ParameterAtStep]] = {}
    for optimizer, rule in rerun.stepping(trace):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
                    name, settings = rerun.names[id(parameter)], rule.settings(group, state)
                    alone = not has_slopes(rule) or parameter.numel() > SMALL
                    key = (id(rule), tuple(settings.items()), tuple(state), parameter.dtype, name if alone else "")
                    alike.setdefault(key, []).append(ParameterAtStep(name, parameter, rule, settings, state))
    return [_joint_step(parameters, factor) for parameters in alike.values()]


class ParameterAtStep(NamedTuple):
    """A parameter that is about to take a step."""

    name: str
    parameter: Tensor
    rule: Rule
    settings: Settings
    state: Mapping[str, Any]


def _joint_step(parameters: Sequence[ParameterAtStep], factor: float) -> JointStep:
    """Several parameters that take the same step; of a rule with a preconditioner, with all tensors that it reads."""
    first = parameters[0]
    shapes = [each.parameter.shape for each in parameters]
    step = JointStep([each.name for each in parameters], shapes, first.rule, first.settings)
    if step.is_scalar:
        return step
    read = {"weight": [each.parameter.detach() for each in parameters]}
    read[GRADIENT] = [each.parameter.grad for each in parameters if each.parameter.grad is not None]
    if first.rule.buffer is not None:
        buffers = [each.state.get(first.rule.buffer) for each in parameters]
        read["buffer"] = [torch.zeros_like(each.parameter) if buffer is None else buffer
                          for each, buffer in zip(parameters, buffers, strict=True)]  # fmt: skip
    for name in first.rule.shared:
        if isinstance(first.state.get(name), Tensor):
            read[name] = [each.state[name] for each in parameters]
    tensors = {name: step.joined(values).detach() for name, values in read.items()}
    if len(parameters) == 1:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if factor != 1.0:
        tensors[GRADIENT] = factor * tensors[GRADIENT]
    return replace(step, tensors=tensors)
