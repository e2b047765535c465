"""Steps that are taken again and held, with all that the adjoint of a step needs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .pass_graph import PassGraph, SavedBytes, build_graph
from .rerun import PassTrace, Rerun, StepTrace
from .step_adjoint import GRADIENT, ParameterStep, Scaling


@dataclass(frozen=True)
class TracedStep:
    """A step that was taken again: all that it read."""

    number: int
    trace: StepTrace
    steps: Mapping[str, ParameterStep]
    """The step of each parameter that took one."""
    weights: Mapping[str, Tensor]
    """The parameters that take gradients, before the step, as leaves of the graphs."""
    fixed: Mapping[str, Tensor]
    """The other parameters."""
    gradients: Mapping[str, Tensor]
    """The summed gradients as backprop gave them, where clipping makes each depend on all of them."""
    scaling: Scaling
    buffers: Sequence[Mapping[str, Tensor]]
    """The model's buffers before each pass."""
    graphs: Sequence[PassGraph | None]
    """The passes, ready to be differentiated once more, where memory allows to keep them."""

    def graph(self, rerun: Rerun, place: int) -> PassGraph:
        """One of its passes, ready to be differentiated once more."""
        kept = self.graphs[place]
        if kept is not None:
            return kept
        return build_graph(rerun, self.trace.passes[place], self.weights, self.fixed, self.buffers[place])

    @property
    def tensor_bytes(self) -> int:
        """The bytes of its tensors, without those of the graphs."""
        tensors = [*self.weights.values(), *self.fixed.values(), *self.gradients.values()]
        tensors += [tensor for buffers in self.buffers for tensor in buffers.values()]
        tensors += [tensor for step in self.steps.values() for tensor in step.tensors.values()]
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
    buffers, passes, graphs = [], [], []
    for one_pass in trace.passes:
        buffers.append({name: tensor.clone() for name, tensor in model.named_buffers()})
        passes.append(_with_generator(one_pass))
        if not with_graphs:
            rerun.backward(one_pass)
            graphs.append(None)
            continue
        graph = build_graph(rerun, passes[-1], weights, fixed, buffers[-1])
        graphs.append(graph)
        _leave_model_as_after(rerun, graph, parameters)
    trace = replace(trace, passes=tuple(passes))
    clip_norm, factor = rerun.scaling_of(trace)
    gradients = {}
    if clip_norm is not None:
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm()) if gradients else 0.0
    scaling = Scaling(factor, clip_norm, norm)
    steps = _steps_of(rerun, trace, scaling.value)
    rerun.end_step(trace, clip_norm, factor)
    return TracedStep(rerun.position, trace, steps, weights, fixed, gradients, scaling, buffers, graphs)


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


def _steps_of(rerun: Rerun, trace: StepTrace, factor: float) -> dict[str, ParameterStep]:
    """What the step is about to read of each parameter, copied."""
    steps = {}
    for optimizer, rule in rerun.stepping(trace):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state: Mapping[str, Any] = optimizer.state.get(parameter, {})
                step = ParameterStep(rule, rule.settings(group, state))
                if not step.is_scalar:
                    step = replace(step, tensors=_tensors_read(step, state, parameter, factor))
                steps[rerun.names[id(parameter)]] = step
    return steps


def _tensors_read(step: ParameterStep, state: Mapping[str, Any], parameter: Tensor, factor: float) -> dict[str, Tensor]:
    """The tensors that a step with a preconditioner reads; the gradient as the optimiser will see it."""
    assert parameter.grad is not None
    tensors = {"weight": parameter.detach().clone(), GRADIENT: factor * parameter.grad.detach()}
    if step.rule.buffer is not None:
        buffer = state.get(step.rule.buffer)
        tensors["buffer"] = torch.zeros_like(tensors["weight"]) if buffer is None else buffer.detach().clone()
    for name in step.rule.shared:
        if isinstance(state.get(name), Tensor):
            tensors[name] = state[name].detach().clone()
    return tensors
