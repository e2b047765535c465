r"""One step of an optimiser as a function that autograd can differentiate.

A rule (``rules/protocol.py``) says that a step is linear in the gradient *given* what all examples share. Here nothing
is given: the preconditioner P depends on the gradient and on the optimiser's state, and so does the clip factor κ.

.. math::
    g &= \kappa(G)\, G,\qquad \kappa = \min\!\big(1,\; c / (\lVert G\rVert + 10^{-6})\big) \\
    P, V' &= \mathrm{precondition}(V, g, W, M) \\
    W' &= w_w W + w_m M + w_g g + w_p\, P (p_w W + p_m M + p_g g) \\
    M' &= m_w W + m_m M + m_g g + m_p\, P (p_w W + p_m M + p_g g)

With ``held=True`` P and κ are constants. The step is then the rule's linear transition, which gives direct
contributions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dualform.rules import Rule, Seen, Settings


@dataclass(frozen=True)
class ParameterInputs:
    """What a step reads of one parameter: its weights, the optimiser's buffer M, and the state V."""

    rule: Rule
    settings: Settings
    weight: Tensor
    buffer: Tensor
    shared: Mapping[str, Tensor]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The same by name: "weight", "buffer", and the names of V."""
        return {"weight": self.weight, "buffer": self.buffer, **self.shared}


def differentiable_step(
    inputs: Mapping[str, ParameterInputs],
    gradients: Mapping[str, Tensor],
    clip_norm: float | None,
    held: bool,
) -> dict[str, dict[str, Tensor]]:
    """All parameters and their state after a step on the summed ``gradients``, by parameter and name of the tensor.

    ``clip_norm`` bounds the norm of all gradients together, as ``clip_grad_norm_`` does.
    """
    if clip_norm is not None:
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = factor.detach() if held else factor
        gradients = {name: factor * gradient for name, gradient in gradients.items()}
        for name, gradient in gradients.items():  # one NaN would reach all parameters through the norm
            if gradient.requires_grad:
                gradient.register_hook(partial(_without_nan, never_trained(gradient, inputs[name].tensors)))
    return {name: _step_of_one(parameter, gradients[name], held) for name, parameter in inputs.items()}


def never_trained(gradient: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """The entries that have no gradient and never had one: a root has no slope at 0, and there the derivative is 0."""
    return (gradient == 0) & torch.stack([tensor == 0 for key, tensor in state.items() if key != "weight"]).all(0)


def _without_nan(never: Tensor, pulled: Tensor) -> Tensor:
    return torch.where(never & pulled.isnan(), 0.0, pulled)


def _step_of_one(parameter: ParameterInputs, gradient: Tensor, held: bool) -> dict[str, Tensor]:
    rule, weight, buffer = parameter.rule, parameter.weight, parameter.buffer
    t, shared = rule.transition(parameter.settings), dict(parameter.shared)
    push: Tensor | float = 0.0
    if rule.precondition is not None:
        eps = torch.finfo(weight.dtype).eps
        p = rule.precondition(parameter.settings, shared, Seen(gradient, weight, buffer, eps))
        p = p.detach() if held else p
        inside = t.pg * gradient + t.pm * buffer + t.pw * weight
        push = p * inside if rule.acts == "entries" else p @ inside
    return {
        "weight": t.ww * weight + t.wm * buffer + t.wg * gradient + t.wp * push,
        "buffer": t.mm * buffer + t.mw * weight + t.mg * gradient + t.mp * push,
        **shared,
    }
