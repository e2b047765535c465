"""A training loop run again, from what each of its steps saw.

The optimiser itself takes the steps, on a copy of the model, so that they round as the first ones did.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn, optim

from dualform.errors import QueryError
from dualform.rules import Rule, rule_for
from dualform.store import GENERATOR, Modes, gradient_norm

from .model_copy import loose_values, restore_loose_values

Losses = Callable[[nn.Module, Any], Tensor]
"""Each example's share of the loss that the loop backpropagated, one number an example."""

Retrain = Callable[[Float[Tensor, " examples"]], Float[Tensor, " queries"]]
"""Trains again with these weights of the examples in the loss, and gives the targets of the trained network."""

Data = Callable[[Tensor], Any]
"""The batch with these indices, as the loop saw it."""


@runtime_checkable
class DataOfStep(Protocol):
    """Data whose batches depend on all passes of a step, as where a loss is divided by the step's tokens."""

    def __call__(self, index: Tensor) -> Any: ...

    def in_step(self, passes: Sequence[Tensor], place: int) -> Any:
        """The batch of one pass of a step; ``passes`` has the indices of all of them."""
        ...


@dataclass(frozen=True)
class PassTrace:
    """One backward pass: its examples, and the state of torch's generator before its forward pass, where it matters."""

    index: Tensor
    generator: Tensor | None = None
    first: int = 0
    """The first visit of the pass: visits are counted over all of training."""
    step: tuple[Tensor, ...] = ()
    """The examples of all passes of its step; empty where it is the only one."""
    place: int = 0
    """Which of them it is."""


@dataclass(frozen=True)
class StepTrace:
    """One step: its backward passes, the settings of all parameter groups, and the norm that clips gradients."""

    passes: tuple[PassTrace, ...]
    groups: tuple[Mapping[str, Any], ...]
    """The settings of each group that differ from those that the optimiser was made with."""
    clip_norm: float | None = None
    scale: float = 1.0
    """The recorded factor between the gradients of backprop and those of the step, where ``clip_norm`` is not known."""
    gradient_norm: float | None = None
    """The recorded norm of a few entries of the gradients of the step, from which the factor follows."""
    optimizers: tuple[int, ...] | None = None
    """The optimisers that took this step; None: all of them."""
    modes: Modes | None = None
    """What was in evaluation mode and what took no gradient, if that was recorded."""
    has_zero_gradients: bool = False
    """Whether a step without passes found gradients of 0, with which momentum and weight decay go on."""


@dataclass
class Rerun:
    """Runs the steps of a training loop again, on ``model`` (a copy) with ``optimizers`` that hold its parameters."""

    model: nn.Module
    optimizers: Sequence[optim.Optimizer]
    losses: Losses
    data: Data
    steps: Sequence[StepTrace]
    weights: Tensor | None = None
    """The weight of each visit in the loss; 1 where not given."""
    position: int = 0
    clip_norm: float | None = None
    """The norm that gradients are clipped to, once a step has shown it."""
    before_pass: Callable[[PassTrace], None] | None = None
    """Is called before the forward pass of each batch."""
    taught: Mapping[type, Rule] = field(default_factory=dict)
    """The rules of optimisers that the library does not know."""
    held_factors: set[int] = field(default_factory=set)
    """Steps whose gradients were scaled by a factor that is no clipping; influence holds it constant."""
    _is_no_clipping: bool = False
    """Whether all of training has shown that the factors of steps are not those of clipping to one norm."""
    _norms: dict[int, float] = field(default_factory=dict)
    """The norm of the gradients of each step as it was recorded."""
    _scales: dict[int, float] = field(default_factory=dict)
    """By what they were scaled then."""
    _modes: Modes | None = None

    def __post_init__(self) -> None:
        self.rules: list[Rule] = [rule_for(optimizer, self.taught) for optimizer in self.optimizers]
        self.parameters = dict(self.model.named_parameters())
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._takes_passes_of_step = isinstance(self.data, DataOfStep)
        self._aliases = {
            alias: self.names[id(parameter)]
            for alias, parameter in self.model.named_parameters(remove_duplicate=False)
            if alias not in self.parameters
        }
        self._has_scales = any(step.gradient_norm is not None or is_scaled(step.scale) for step in self.steps)
        self._first_trained = self._first_steps_without(lambda modes: modes.without_gradient, self.parameters)
        modules = [name for name, _ in self.model.named_modules()]
        self._first_training = self._first_steps_without(lambda modes: modes.evaluating, modules)

    def state(self) -> dict[str, Any]:
        """All that a later call of :meth:`load` needs to go on from here."""
        return copy.deepcopy(
            {
                "position": self.position,
                "generator": torch.get_rng_state(),
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "loose": loose_values(self.model),
            }
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Go back (or forward) to a state."""
        self.position = state["position"]
        torch.set_rng_state(state["generator"])
        self.model.load_state_dict(state["model"])
        restore_loose_values(self.model, state["loose"])
        for optimizer, content in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(content))

    def kept_state(self, step: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """A state that a memory kept, in the form of :meth:`state`."""
        states: dict[str, dict[str, Any]] = {}
        model = self.model.state_dict()
        for key, tensor in tensors.items():
            name, _, own = key.partition("#")
            if own.endswith("#number"):
                states.setdefault(name, {})[own.removesuffix("#number")] = float(tensor)
            elif own and name:
                states.setdefault(name, {})[own] = tensor
            elif name:
                model[name] = tensor
        optimizers = []
        for optimizer in self.optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            own_states = {i: states[self.names[id(p)]] for i, p in enumerate(parameters) if self.names[id(p)] in states}
            optimizers.append({**optimizer.state_dict(), "state": own_states})
        return {
            "position": step,
            "generator": tensors[GENERATOR].clone(),
            "model": model,
            "optimizers": optimizers,
            "loose": loose_values(self.model),
        }

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that an optimiser holds, or that take gradients."""
        held = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self.parameters.items() if id(p) in held or p.requires_grad}

    def _first_steps_without(
        self, left_out: Callable[[Modes], Sequence[str]], names: Iterable[str]
    ) -> dict[str, int]:  # fmt: skip
        """By name, the number of the first step in which it was not left out; only where some were left out later."""
        all_modes = {id(step.modes): step.modes for step in self.steps if step.modes is not None}
        if len(all_modes) < 2:
            return {}
        first: dict[str, int] = {}
        seen: set[int] = set()
        for number, step in enumerate(self.steps, start=1):
            if step.modes is not None and id(step.modes) not in seen:
                seen.add(id(step.modes))
                without = set(left_out(step.modes))
                first |= {name: number for name in names if name not in without and name not in first}
        return first

    def frozen_since(self, step: int) -> set[str]:
        """The parameters that take no gradient now, in this step, but took one in an earlier one."""
        return {
            name
            for name, parameter in self.parameters.items()
            if not parameter.requires_grad and self._first_trained.get(name, step) < step
        }

    def evaluating_since(self, step: int) -> set[str]:
        """The modules that are in evaluation mode now, in this step, but were in training mode in an earlier one."""
        return {
            name
            for name, module in self.model.named_modules()
            if not module.training and self._first_training.get(name, step) < step
        }

    def run(self, end: int) -> None:
        """Run up to a step."""
        while self.position < end:
            trace = self.begin_step()
            for one_pass in trace.passes:
                self.backward(one_pass)
            self.end_step(trace, *self.scaling_of(trace))

    def begin_step(self) -> StepTrace:
        """Set the optimisers and the modules as they were in the next step; gradients are those before its passes."""
        trace = self.steps[self.position]
        groups = [(group, optimizer.defaults) for optimizer in self.optimizers for group in optimizer.param_groups]
        for (group, defaults), settings in zip(groups, trace.groups, strict=True):
            group |= group_settings(defaults, settings)
        self.set_modes(trace.modes)
        for parameter in self.parameters.values():
            parameter.grad = None
        if trace.has_zero_gradients:
            for optimizer, _ in self.stepping(trace):
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        return trace

    def end_step(self, trace: StepTrace, clip_norm: float | None, factor: float) -> None:
        """Scale the gradients, and take the step."""
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters.values(), clip_norm)
        elif factor != 1.0:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for optimizer, _ in self.stepping(trace):
            optimizer.step()
        self.position += 1

    def stepping(self, trace: StepTrace) -> Iterator[tuple[optim.Optimizer, Rule]]:
        """The optimisers that take a step, with their rules."""
        for number, (optimizer, rule) in enumerate(zip(self.optimizers, self.rules, strict=True)):
            if trace.optimizers is None or number in trace.optimizers:
                yield optimizer, rule

    def scaling_of(self, trace: StepTrace) -> tuple[float | None, float]:
        """The norm that this step clips gradients to, and the factor that it multiplies them with if it does not clip.

        A memory holds the factor alone. If the factor is what clipping to one norm gives at every step, gradients were
        clipped, and the factor depends on all examples of the step. The run without ``weights`` finds that out.
        """
        if trace.clip_norm is not None or not self._has_scales:
            return trace.clip_norm, 1.0
        if self.position not in self._norms:
            self._scales[self.position] = self._recorded_scale(trace)
            assert self.weights is None, "the run without weights comes first"
            self._norms[self.position] = self._norm_of_gradients()
        norm, scale = self._norms[self.position] + 1e-6, self._scales[self.position]
        if self.clip_norm is None and is_scaled(scale) and scale > 0 and not self._is_no_clipping:
            self.clip_norm = _round_number_near(scale * norm, self._precision_of_gradients())
        if self.clip_norm is not None and abs(scale - min(1.0, self.clip_norm / norm)) < 1e-3 * scale:
            return self.clip_norm, 1.0
        if is_scaled(scale):
            self.held_factors.add(self.position + 1)
        return None, scale if is_scaled(scale) else 1.0

    def _norm_of_gradients(self) -> float:
        """Their norm, rounded as ``clip_grad_norm_`` rounds it: in float32 that of a large gradient is off by 1e-5."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        if not norms:
            return 0.0
        return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])))

    def _precision_of_gradients(self) -> float:
        return max(torch.finfo(p.grad.dtype).eps for p in self.parameters.values() if p.grad is not None)

    def doubts_clipping(self) -> bool:
        """Look back at all of training: whether some factors that were taken for those of clipping cannot be that.

        The norm that gradients are clipped to was read from the first step that scaled them. If it fits no other one,
        all factors are held instead, and training has to be run again.
        """
        scaled = [position for position, scale in self._scales.items() if is_scaled(scale)]
        if self.clip_norm is None or len(scaled) < 2 or len(self.held_factors) < len(scaled) - 1:
            return False
        self.clip_norm, self._is_no_clipping = None, True
        return True

    def constant_factor(self) -> float | None:
        """The factor by which all steps so far scaled their gradients, if it is one and the same, and not 1."""
        scales = list(self._scales.values())
        is_constant = bool(scales) and is_scaled(scales[0]) and max(scales) - min(scales) < 1e-3 * abs(scales[0])
        return scales[0] if is_constant else None

    def _recorded_scale(self, trace: StepTrace) -> float:
        """By what the gradients were scaled between backprop and the step, when the run was recorded."""
        if trace.gradient_norm is None:
            return trace.scale
        norms = [
            gradient_norm([parameter for group in optimizer.param_groups for parameter in group["params"]])
            for optimizer, _ in self.stepping(trace)
        ]
        norm = math.hypot(*norms)
        return trace.gradient_norm / norm if norm else 1.0

    def set_modes(self, modes: Modes | None) -> None:
        """Put modules into evaluation mode, and parameters out of the gradient, as they were in the recorded run."""
        if modes is None or modes is self._modes:
            return
        self._modes = modes
        for name, module in self.model.named_modules():
            module.training = name not in modes.evaluating
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name not in modes.without_gradient)

    def with_aliases(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the names of parameters, and also by the other names of those that are tied."""
        others = {alias: tensors[name] for alias, name in self._aliases.items() if name in tensors}
        return {**tensors, **others}

    def batch(self, one_pass: PassTrace) -> Any:
        """The batch of a pass as the loop saw it. Random numbers that it draws are not those of the model."""
        with torch.random.fork_rng(devices=[]):
            if self._takes_passes_of_step:
                assert isinstance(self.data, DataOfStep)
                return self.data.in_step(one_pass.step or (one_pass.index,), one_pass.place)
            return self.data(one_pass.index)

    def backward(self, one_pass: PassTrace) -> None:
        """One backward pass as the loop made it."""
        if self.before_pass is not None:
            self.before_pass(one_pass)
        batch = self.batch(one_pass)
        if one_pass.generator is not None:
            torch.set_rng_state(one_pass.generator)
        losses = self.losses(self.model, batch)
        if losses.shape != one_pass.index.shape:
            raise QueryError(
                f"losses(model, batch) gave a tensor of shape {tuple(losses.shape)} for a batch of "
                f"{len(one_pass.index)} examples: it must give one number an example, its share of the loss "
                "that was backpropagated."
            )
        if self.weights is not None:
            losses = losses * self.weights[one_pass.first : one_pass.first + len(one_pass.index)].to(losses)
        losses.sum().backward()


def bytes_of_state(state: Any) -> int:
    """The bytes of all tensors in a state."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    parts = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return sum(map(bytes_of_state, parts))


def is_scaled(scale: float) -> bool:
    """Whether a factor is more than the rounding of a product."""
    return abs(scale - 1.0) >= 1e-5


def _round_number_near(bound: float, precision: float) -> float:
    """The norm that a loop probably clips to: a number of few digits, if the precision of gradients allows to tell."""
    tolerance = min(max(1e-12, 16 * precision), 1e-3)
    for digits in range(1, int(-math.log10(tolerance))):
        number = float(f"{bound:.{digits}g}")
        if abs(number - bound) < tolerance * bound:
            return number
    return bound


def group_settings(defaults: Mapping[str, Any], settings: Mapping[str, float]) -> dict[str, Any]:
    """The recorded numbers of a step as the settings of a parameter group."""
    group: dict[str, Any] = {}
    for name, default in defaults.items():
        if isinstance(default, tuple | list):
            numbers = [settings.get(f"{name}{place}", value) for place, value in enumerate(default, start=1)]
            group[name] = tuple(numbers)
        elif name in settings:
            group[name] = _like(default, settings[name])
    return group


def _like(default: Any, number: float) -> Any:
    """A recorded number as the optimiser had it: a memory holds all of them as floats."""
    if isinstance(default, bool):
        return bool(number)
    return int(number) if isinstance(default, int) and number.is_integer() else number
