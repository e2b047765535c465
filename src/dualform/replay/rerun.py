"""A training loop run again, from what each of its steps saw.

The optimiser itself takes the steps, on a copy of the model, so that they round as the first ones did.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim

from dualform.rules import Rule, Settings, rule_for

from .differentiable_step import ParameterInputs

Losses = Callable[[nn.Module, Any], Tensor]
"""Each example's share of the loss that the loop backpropagated, one number an example."""

Data = Callable[[Tensor], Any]
"""The batch with these indices, as the loop saw it."""


@dataclass(frozen=True)
class PassTrace:
    """One backward pass: its examples, and the state of torch's generator before its forward pass, where it matters."""

    index: Tensor
    generator: Tensor | None = None


@dataclass(frozen=True)
class StepTrace:
    """One step: its backward passes, the settings of all parameter groups, and the norm that clips gradients."""

    passes: tuple[PassTrace, ...]
    groups: tuple[Mapping[str, Any], ...]
    clip_norm: float | None = None


@dataclass(frozen=True)
class TracedStep:
    """A step that was taken again: all that it read."""

    number: int
    trace: StepTrace
    inputs: Mapping[str, ParameterInputs]
    untrained: Mapping[str, Tensor]
    """Parameters that had no gradient in this step."""
    gradients: Mapping[str, Tensor]
    """The summed gradients as backprop gave them, before clipping."""
    buffers: tuple[Mapping[str, Tensor], ...]
    """The model's buffers before each backward pass."""


@dataclass
class Rerun:
    """Runs the steps of a training loop again, on ``model`` (a copy) with ``optimizers`` that hold its parameters."""

    model: nn.Module
    optimizers: Sequence[optim.Optimizer]
    losses: Losses
    data: Data
    steps: Sequence[StepTrace]
    weights: Callable[[Tensor], Tensor] | None = None
    """The weight of each example in the loss, by index; 1 where not given."""
    position: int = 0
    _rules: list[Rule] = field(init=False)

    def __post_init__(self) -> None:
        self._rules = [rule_for(optimizer) for optimizer in self.optimizers]

    def state(self) -> dict[str, Any]:
        """All that a later call of :meth:`load` needs to go on from here."""
        return copy.deepcopy(
            {
                "position": self.position,
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            }
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Go back (or forward) to a state."""
        self.position = state["position"]
        self.model.load_state_dict(state["model"])
        for optimizer, content in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(content))

    def run(self, end: int) -> None:
        """Run up to a step."""
        while self.position < end:
            self._advance(traced=False)

    def traced(self, end: int) -> Iterator[TracedStep]:
        """Run up to a step, and give what each of the steps read."""
        while self.position < end:
            step = self._advance(traced=True)
            assert step is not None
            yield step

    def _advance(self, traced: bool) -> TracedStep | None:
        trace = self.steps[self.position]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, settings in zip(groups, trace.groups, strict=True):
            group |= settings
        buffers = []
        self.model.zero_grad(set_to_none=True)
        for one_pass in trace.passes:
            if traced:
                buffers.append({name: tensor.clone() for name, tensor in self.model.named_buffers()})
            self.backward(one_pass)
        step = self._trace(trace, tuple(buffers)) if traced else None
        if trace.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), trace.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.position += 1
        return step

    def backward(self, one_pass: PassTrace) -> None:
        """One backward pass as the loop made it."""
        if one_pass.generator is not None:
            torch.set_rng_state(one_pass.generator)
        losses = self.losses(self.model, self.data(one_pass.index))
        if self.weights is not None:
            losses = losses * self.weights(one_pass.index).to(losses)
        losses.sum().backward()

    def _trace(self, trace: StepTrace, buffers: tuple[Mapping[str, Tensor], ...]) -> TracedStep:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        inputs, gradients = {}, {}
        for rule, optimizer in zip(self._rules, self.optimizers, strict=True):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        name = names[id(parameter)]
                        inputs[name] = _inputs_of(rule, group, optimizer.state.get(parameter, {}), parameter)
                        gradients[name] = parameter.grad.clone()
        untrained = {
            name: parameter.detach().clone() for name, parameter in self.model.named_parameters() if name not in inputs
        }
        return TracedStep(self.position + 1, trace, inputs, untrained, gradients, buffers)


def _inputs_of(
    rule: Rule, group: Mapping[str, Any], state: Mapping[str, Any], parameter: nn.Parameter
) -> ParameterInputs:
    """What a step is about to read of one parameter, copied."""
    settings: Settings = rule.settings(group, state)
    buffer = state.get(rule.buffer) if rule.buffer else None
    shared = {name: state[name].detach().clone() for name in rule.shared if isinstance(state.get(name), Tensor)}
    return ParameterInputs(
        rule,
        settings,
        parameter.detach().clone(),
        torch.zeros_like(parameter).detach() if buffer is None else buffer.detach().clone(),
        shared,
    )
