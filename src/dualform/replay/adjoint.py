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

``direct=True`` leaves out H and holds what all examples share (the preconditioner, the clip factor, the buffers) at its
recorded value. That is the direct contribution of an example, summed over all parameters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.hooks import RemovableHandle

from .differentiable_step import ParameterInputs, differentiable_step, never_trained
from .rerun import PassTrace, Rerun, TracedStep

Adjoint = dict[str, dict[str, Tensor]]
"""By parameter and tensor ("weight", "buffer", a name of the optimiser's state): (query, *shape)."""

BUFFERS = "#buffers"
"""Where an adjoint holds what belongs to the model's own buffers."""


@dataclass(frozen=True)
class Influences:
    """Of each visit, in the order of training: its step, its example, and its influence on each query."""

    steps: Int[Tensor, " visits"]
    index: Int[Tensor, " visits"]
    values: Float[Tensor, "queries visits"]

    def by_example(self, examples: int) -> Float[Tensor, "queries examples"]:
        """All visits of an example together."""
        return self.values.new_zeros(len(self.values), examples).index_add_(1, self.index, self.values)


def influences(
    rerun: Rerun,
    targets: Callable[[nn.Module], Float[Tensor, " queries"]],
    states: Sequence[Mapping[str, Any]],
    *,
    direct: bool = False,
) -> Influences:
    """The influence of every visit on each of the ``targets``, which are functions of the trained model.

    ``states`` are kept ones (of :meth:`Rerun.state`), the first of them at step 0. The stretches between them run
    again, the last one first; what the steps of a stretch read is held in memory.
    """
    end = len(rerun.steps)
    rerun.load(states[-1])
    rerun.run(end)
    adjoint = _adjoint_of_targets(rerun.model, targets, direct)
    lines: list[tuple[int, Tensor, Tensor]] = []
    for state in reversed(states):
        rerun.load(state)
        stretch = list(rerun.traced(end))
        for step in reversed(stretch):
            adjoint, influence = _step_back(rerun, step, adjoint, direct)
            lines += [
                (step.number, one_pass.index, values)
                for one_pass, values in zip(reversed(step.trace.passes), influence, strict=True)
            ]
        end = state["position"]
    lines.reverse()
    return Influences(
        torch.cat([torch.full_like(index, number) for number, index, _ in lines]),
        torch.cat([index for _, index, _ in lines]),
        torch.cat([values for _, _, values in lines], dim=1),
    )


def _adjoint_of_targets(
    model: nn.Module, targets: Callable[[nn.Module], Float[Tensor, " queries"]], direct: bool
) -> Adjoint:
    """∂φ/∂θ and ∂φ/∂(buffers) at the end of training, in evaluation mode."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    buffers = (
        {} if direct else {name: buffer.clone().requires_grad_() for name, buffer in _statistics_of(model).items()}
    )
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    leaves = [*parameters.values(), *buffers.values()]
    try:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), _normalised_by(model, buffers):
            values = targets(model)
        rows = [torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True) for value in values]
    finally:
        for module, mode in training.items():
            module.training = mode
    stacked = [torch.stack(column) for column in zip(*rows, strict=True)]
    adjoint: Adjoint = {name: {"weight": value} for name, value in zip(parameters, stacked, strict=False)}
    adjoint[BUFFERS] = dict(zip(buffers, stacked[len(parameters) :], strict=True))
    return adjoint


def _step_back(
    rerun: Rerun, step: TracedStep, adjoint: Adjoint, direct: bool
) -> tuple[Adjoint, list[Float[Tensor, "queries b"]]]:
    """The adjoint before a step, and the influence of the examples of its passes, the last pass first."""
    rerun.set_modes(step.trace.modes)
    queries = len(next(iter(next(iter(adjoint.values())).values())))
    before, pull = _through_the_step(step, adjoint, direct, queries)
    for name in step.untrained:
        if name in adjoint:
            before[name] = adjoint[name]
    buffers = dict(adjoint.get(BUFFERS, {}))
    influence = []
    for one_pass, at_pass in zip(reversed(step.trace.passes), reversed(step.buffers), strict=True):
        curved, buffers, values = _through_the_pass(rerun, step, one_pass, at_pass, pull, buffers, direct)
        for name, tensor in curved.items():
            before[name]["weight"] = before[name]["weight"] + tensor
        influence.append(values)
    before[BUFFERS] = buffers
    return before, influence


def _through_the_step(
    step: TracedStep, adjoint: Adjoint, direct: bool, queries: int
) -> tuple[Adjoint, dict[str, Tensor]]:
    """The adjoint of what the step read, and of the gradient: ∂step/∂(θ, s)ᵀ λ and ∂step/∂Gᵀ λ."""
    if step.clip_norm is None and all(inputs.rule.precondition is None for inputs in step.inputs.values()):
        return _through_a_scalar_step(step, adjoint)
    leaves = {name: {key: tensor.detach().requires_grad_() for key, tensor in inputs.tensors.items()}
              for name, inputs in step.inputs.items()}  # fmt: skip
    gradients = {name: gradient.detach().requires_grad_() for name, gradient in step.gradients.items()}
    inputs = {
        name: ParameterInputs(
            old.rule, old.settings, leaves[name]["weight"], leaves[name]["buffer"],
            {key: tensor for key, tensor in leaves[name].items() if key not in ("weight", "buffer")},
        )
        for name, old in step.inputs.items()
    }  # fmt: skip
    with torch.enable_grad():
        scaled = {name: step.factor * gradient for name, gradient in gradients.items()}
        after = differentiable_step(inputs, scaled, step.clip_norm, held=direct)
    outputs, covectors = [], []
    for name, tensors in after.items():
        for key, tensor in tensors.items():
            if key in adjoint.get(name, {}) and tensor.requires_grad:
                outputs.append(tensor)
                covectors.append(adjoint[name][key])
    flat = [tensor for tensors in leaves.values() for tensor in tensors.values()] + list(gradients.values())
    pulled = iter(
        tensor.new_zeros(queries, *tensor.shape) if value is None else value
        for tensor, value in zip(flat, _pull_back(outputs, flat, covectors), strict=True)
    )
    before = {name: {key: next(pulled) for key in tensors} for name, tensors in leaves.items()}
    pull = {name: next(pulled) for name in gradients}
    for name, tensors in leaves.items():
        _clear_roots_at_zero(gradients[name], tensors, [*before[name].values(), pull[name]])
    return before, pull


def _through_a_scalar_step(step: TracedStep, adjoint: Adjoint) -> tuple[Adjoint, dict[str, Tensor]]:
    """The same where the step is a sum with numbers as coefficients."""
    before: Adjoint = {}
    pull = {}
    for name, inputs in step.inputs.items():
        t, weight = inputs.rule.transition(inputs.settings), adjoint[name]["weight"]
        buffer = adjoint[name].get("buffer")
        before[name] = {"weight": t.ww * weight, "buffer": t.wm * weight}
        pull[name] = step.factor * t.wg * weight
        if buffer is not None:
            before[name]["weight"] += t.mw * buffer
            before[name]["buffer"] += t.mm * buffer
            pull[name] += step.factor * t.mg * buffer
    return before, pull


def _clear_roots_at_zero(gradient: Tensor, state: Mapping[str, Tensor], pulled: Sequence[Tensor]) -> None:
    """Entries that never had a gradient give 0 · ∞, and there the derivative is 0."""
    if not any(bool(value.isnan().any()) for value in pulled):
        return
    never = never_trained(gradient, state)
    for value in pulled:
        value.masked_fill_(never & value.isnan(), 0.0)


def _through_the_pass(
    rerun: Rerun, step: TracedStep, one_pass: PassTrace, at_pass: Mapping[str, Tensor], pull: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor], direct: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor], Float[Tensor, "queries b"]]:  # fmt: skip
    """H v by parameter, the adjoint of the buffers before the pass, and the influence of its examples."""
    weights = {name: inputs.weight.detach().requires_grad_() for name, inputs in step.inputs.items()}
    statistics: list[tuple[str, Tensor, float]] = []
    with torch.enable_grad(), _at(one_pass), _batch_statistics(rerun.model, statistics, bool(buffers)):
        losses = _losses(rerun, step, weights, at_pass, one_pass)
        share = torch.ones_like(losses, requires_grad=True)
        gradient = torch.autograd.grad(
            (share * losses).sum(), list(weights.values()), create_graph=True, materialize_grads=True
        )
    outputs = [value for value in gradient if value.requires_grad]
    covectors = [pull[name] for name, value in zip(weights, gradient, strict=True) if value.requires_grad]
    before = dict(buffers)
    for name, value, momentum in reversed(statistics):  # a layer may be called several times
        if value.requires_grad:  # statistics of the inputs themselves do not depend on the weights
            outputs.append(momentum * value)
            covectors.append(before[name])
        before[name] = (1 - momentum) * before[name]
    leaves = [share] if direct else [share, *weights.values()]
    values, *curved = _pull_back(outputs, leaves, covectors)
    assert values is not None  # every example has a share of some gradient
    return {name: value for name, value in zip(weights, curved, strict=False) if value is not None}, before, values


def _pull_back(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], covectors: Sequence[Float[Tensor, "queries ..."]]
) -> list[Float[Tensor, "queries ..."] | None]:
    """The gradient of Σ ⟨covector, output⟩ for each query; None for inputs that no output depends on."""
    if len(covectors[0]) == 1:  # without the cost of batching
        single = torch.autograd.grad(outputs, inputs, [covector[0] for covector in covectors], allow_unused=True)
        return [None if value is None else value[None] for value in single]
    return list(torch.autograd.grad(outputs, inputs, covectors, is_grads_batched=True, allow_unused=True))


def _losses(
    rerun: Rerun, step: TracedStep, weights: Mapping[str, Tensor], at_pass: Mapping[str, Tensor], one_pass: PassTrace
) -> Float[Tensor, " b"]:
    """The losses of a pass at these weights and buffers, which take the place of the copied model's own meanwhile."""
    tensors = {**weights, **step.untrained, **{name: buffer.clone() for name, buffer in at_pass.items()}}
    # what torch.func.functional_call does around one forward pass, here around whatever the losses do with the model
    with _reparametrize_module(rerun.model, tensors, tie_weights=True):
        return rerun.losses(rerun.model, rerun.batch(one_pass))


@contextmanager
def _at(one_pass: PassTrace) -> Iterator[None]:
    """The generator as it stood before the pass; and kernels that can be differentiated twice."""
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        if one_pass.generator is not None:
            torch.set_rng_state(one_pass.generator)
        yield


def _batch_statistics(
    model: nn.Module, statistics: list[tuple[str, Tensor, float]], wanted: bool
) -> AbstractContextManager[None]:
    """Collects what batch normalisation puts into its running statistics, as functions of the weights."""

    def collect(name: str, module: _BatchNorm, args: tuple) -> None:
        if not module.training:
            return
        (x,) = args
        axes = [axis for axis in range(x.ndim) if axis != 1]
        count = x.numel() // x.shape[1]
        assert module.num_batches_tracked is not None
        momentum = 1.0 / (int(module.num_batches_tracked) + 1) if module.momentum is None else module.momentum
        variance = x.var(axes, unbiased=False) * (count / max(count - 1, 1))
        statistics.append((f"{name}.running_mean", x.mean(axes), momentum))
        statistics.append((f"{name}.running_var", variance, momentum))

    layers = _batch_norms(model) if wanted else {}
    return _removed(module.register_forward_pre_hook(partial(collect, name)) for name, module in layers.items())


def _normalised_by(model: nn.Module, statistics: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Batch normalisation in evaluation mode, by statistics that autograd sees."""

    def normalise(name: str, module: _BatchNorm, args: tuple, output: Tensor) -> Tensor:
        shape = [1, -1] + [1] * (args[0].ndim - 2)
        mean, variance = (statistics[f"{name}.running_{which}"].reshape(shape) for which in ("mean", "var"))
        out = (args[0] - mean) / (variance + module.eps).sqrt()
        return out if module.weight is None else out * module.weight.reshape(shape) + module.bias.reshape(shape)

    layers = _batch_norms(model) if statistics else {}
    return _removed(module.register_forward_hook(partial(normalise, name)) for name, module in layers.items())


@contextmanager
def _removed(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks that stay until the block ends."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def _batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch normalisation layers that keep running statistics."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    }


def _statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Their running statistics, by the names of the buffers."""
    return {
        f"{name}.running_{which}": getattr(module, f"running_{which}")
        for name, module in _batch_norms(model).items()
        for which in ("mean", "var")
    }
