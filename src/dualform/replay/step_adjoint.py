r"""One step of an optimiser, differentiated: from what a target feels of the state after it to what it feels of before.

A step is :math:`\theta_t, s_t = \mathrm{step}_t(\theta_{t-1}, s_{t-1}, c\,G_t)`, with a factor c of the gradients that
may be that of clipping. :func:`through_the_step` gives :math:`(\partial\,\mathrm{step}_t/\partial(\theta, s))^\top
\lambda` and :math:`(\partial\,\mathrm{step}_t / \partial G_t)^\top \lambda`. Where every entry takes a step of its own
(all rules but Adafactor and Muon) the derivatives are the *slopes* of the entries: tensors of the shape of the
parameter, or plain numbers, computed once for all queries.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.rules import Rule, Seen, Settings

Adjoint = dict[str, dict[str, Tensor]]
"""By parameter and tensor ("weight", "buffer", a name of the optimiser's state): (query, *shape)."""

Slopes = Mapping[tuple[str, str], float | Tensor]
"""The derivative of one tensor after the step in another one before it, for each entry; 0 where there is none."""

GRADIENT = "gradient"
"""What a step reads besides the weights and the state."""


@dataclass(frozen=True)
class JointStep:
    """The step of one parameter, or of several that take the same one: the rule, the numbers and the tensors read."""

    names: Sequence[str]
    shapes: Sequence[torch.Size]
    rule: Rule
    settings: Settings
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """"weight", "gradient" (as the optimiser saw it), "buffer" and the state V by name; empty for a scalar rule. Those
    of several parameters are in one row."""

    @property
    def is_scalar(self) -> bool:
        """Whether the step is a sum with plain numbers as coefficients."""
        return self.rule.precondition is None

    @property
    def has_slopes(self) -> bool:
        """Whether every entry takes a step of its own."""
        return has_slopes(self.rule)

    def joined(self, tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
        """Tensors of the parameters as those of the step; they may have an ``axis`` of queries before their own."""
        if len(self.names) == 1:
            return tensors[0]
        return torch.cat([tensor.flatten(axis) for tensor in tensors], dim=axis)

    def parted(self, tensor: Tensor, axis: int = 0) -> Sequence[Tensor]:
        """The opposite of :meth:`joined`."""
        if len(self.names) == 1:
            return [tensor]
        parts = tensor.split([shape.numel() for shape in self.shapes], dim=axis)
        return [part.unflatten(axis, shape) if shape else part.squeeze(axis)
                for part, shape in zip(parts, self.shapes, strict=True)]  # fmt: skip


def has_slopes(rule: Rule) -> bool:
    """Whether every entry of a parameter takes a step of its own."""
    return rule.precondition is None or (rule.local and rule.acts == "entries")


@dataclass(frozen=True)
class Scaling:
    """By what a step multiplies the gradients of backprop. With a ``clip_norm`` the factor follows from their norm."""

    factor: float = 1.0
    clip_norm: float | None = None
    norm: float = 0.0

    @property
    def is_clipped(self) -> bool:
        """Whether the norm is larger than it may be."""
        return self.clip_norm is not None and self.norm + 1e-6 > self.clip_norm

    @property
    def value(self) -> float:
        """The factor, as ``clip_grad_norm_`` computes it."""
        return self.clip_norm / (self.norm + 1e-6) if self.clip_norm is not None and self.is_clipped else self.factor


def through_the_step(
    steps: Sequence[JointStep],
    gradients: Mapping[str, Tensor],
    scaling: Scaling,
    adjoint: Adjoint,
    slopes: Mapping[str, Slopes],
    *,
    held: bool,
) -> tuple[Adjoint, dict[str, Tensor]]:
    """The adjoint of what the step read, and that of the ``gradients`` as backprop gave them.

    ``slopes`` may lack parameters: they are differentiated query by query. ``held``: what all examples share (P and the
    factor of clipping) is a constant. The tensors of ``adjoint`` may become part of the result.
    """
    before: Adjoint = {}
    for step in steps:
        if step.names[0] in slopes:
            before |= {name: _by_slopes(slopes[name], adjoint[name]) for name in step.names}
        else:
            before |= _by_query(step, [adjoint[name] for name in step.names], held)
    pull = {name: tensors.pop(GRADIENT) for name, tensors in before.items() if GRADIENT in tensors}
    return before, _through_the_scaling(gradients, scaling, pull, held)


def _by_slopes(slopes: Slopes, after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Σ over the tensors after the step: their adjoint times their slope in each tensor before it."""
    total: dict[str, Tensor] = {}
    own: set[str] = set()  # what is new, and may be changed in place
    for (late, early), slope in slopes.items():
        if late not in after:
            continue
        if early not in total:
            stays = not isinstance(slope, Tensor) and slope == 1.0 and late == early
            total[early] = after[late] if stays else slope * after[late]
            own |= set() if stays else {early}
            continue
        if early not in own:
            total[early] = total[early].clone()
            own.add(early)
        if isinstance(slope, Tensor):
            total[early].addcmul_(slope, after[late])
        else:
            total[early].add_(after[late], alpha=slope)
    return total


def _by_query(step: JointStep, adjoints: Sequence[Mapping[str, Tensor]], held: bool) -> Adjoint:
    """The same by autograd, for all queries side by side."""
    joined = {
        key: step.joined([adjoint.get(key, torch.zeros_like(adjoint["weight"])) for adjoint in adjoints], axis=1)
        for key in dict.fromkeys(key for adjoint in adjoints for key in adjoint)
    }
    leaves, after = _taken_again(step, held)
    names = [name for name, tensor in after.items() if name in joined and tensor.requires_grad]
    found = pull_back([after[name] for name in names], list(leaves.values()), [joined[name] for name in names])
    pulled = {name: value for name, value in zip(leaves, found, strict=True) if value is not None}
    _clear_roots_at_zero(step, pulled.values())
    parts = {key: step.parted(tensor, axis=1) for key, tensor in pulled.items()}
    return {name: {key: part[place] for key, part in parts.items()} for place, name in enumerate(step.names)}


def pull_back(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], covectors: Sequence[Float[Tensor, "queries ..."]]
) -> list[Float[Tensor, "queries ..."] | None]:
    """The gradient of Σ ⟨covector, output⟩ for each query; None for inputs that no output depends on."""
    gradient: Callable = partial(torch.autograd.grad, outputs, inputs, allow_unused=True, retain_graph=True)
    if not outputs:
        return [None] * len(inputs)
    if len(covectors[0]) == 1:  # without the cost of batching
        return [None if value is None else value[None] for value in gradient([covector[0] for covector in covectors])]
    with suppress(RuntimeError):  # of an operation that torch cannot batch, such as GroupNorm
        return list(gradient(covectors, is_grads_batched=True))
    by_query = [gradient(list(of_query)) for of_query in zip(*covectors, strict=True)]
    return [None if parts[0] is None else torch.stack(parts) for parts in zip(*by_query, strict=True)]


def _through_the_scaling(
    gradients: Mapping[str, Tensor], scaling: Scaling, pull: dict[str, Tensor], held: bool
) -> dict[str, Tensor]:
    """From the adjoint of the scaled gradients to that of the gradients. Clipping makes each depend on all of them."""
    value = scaling.value
    if scaling.is_clipped and not held and pull:
        along = sum(torch.einsum("q...,...->q", pulled, gradients[name]) for name, pulled in pull.items())
        assert isinstance(along, Tensor)
        slope = -value / (scaling.norm + 1e-6) / scaling.norm
        bent = {name: slope * along.reshape(-1, *[1] * tensor.ndim) * tensor for name, tensor in gradients.items()}
        return {name: tensor.add_(pull[name], alpha=value) if name in pull else tensor for name, tensor in bent.items()}
    return pull if value == 1.0 else {name: value * pulled for name, pulled in pull.items()}


# ---------------------------------------------------------------------------------------------------- slopes


def slopes_of(steps: Sequence[JointStep], *, held: bool, queries: int) -> dict[str, Slopes]:
    """The slopes of parameters whose entries take steps of their own, where they save work for so many queries."""
    found: dict[str, Slopes] = {}
    for step in steps:
        if step.is_scalar:
            found |= dict.fromkeys(step.names, _scalar_slopes(step))
        elif step.has_slopes and queries > 1:
            parts = {pair: step.parted(slope) for pair, slope in _slopes_by_autograd(step, held).items()}
            for place, name in enumerate(step.names):
                found[name] = {pair: part[place] for pair, part in parts.items()}
    return found


def _scalar_slopes(step: JointStep) -> Slopes:
    t = step.rule.transition(step.settings)
    slopes = {
        ("weight", "weight"): t.ww, ("weight", "buffer"): t.wm, ("weight", GRADIENT): t.wg,
        ("buffer", "weight"): t.mw, ("buffer", "buffer"): t.mm, ("buffer", GRADIENT): t.mg,
    }  # fmt: skip
    return {pair: slope for pair, slope in slopes.items() if slope}


def _slopes_by_autograd(step: JointStep, held: bool) -> dict[tuple[str, str], Tensor]:
    """One backward pass for each tensor after the step."""
    leaves, after = _taken_again(step, held)
    slopes = {}
    for late, tensor in after.items():
        if tensor.requires_grad:
            found = torch.autograd.grad(
                tensor, list(leaves.values()), torch.ones_like(tensor), retain_graph=True, allow_unused=True
            )
            for early, slope in zip(leaves, found, strict=True):
                if slope is not None:
                    slopes[late, early] = slope
    _clear_roots_at_zero(step, slopes.values())
    return slopes


def _taken_again(step: JointStep, held: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the step reads, as leaves, and the tensors after it as functions of them."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in step.tensors.items()}
    rule, weight, gradient = step.rule, leaves["weight"], leaves[GRADIENT]
    buffer = leaves["buffer"] if "buffer" in leaves else torch.zeros_like(weight)
    shared = {name: leaf for name, leaf in leaves.items() if name not in ("weight", "buffer", GRADIENT)}
    t = rule.transition(step.settings)
    assert rule.precondition is not None
    with torch.enable_grad():
        p = rule.precondition(step.settings, shared, Seen(gradient, weight, buffer, torch.finfo(weight.dtype).eps))
        p = p.detach() if held else p
        inside = _sum((t.pg, gradient), (t.pm, buffer), (t.pw, weight))
        push = p * inside if rule.acts == "entries" else p @ inside
        push = push.detach() if rule.signs_only and not held else push  # exactly: P x = sign(x) would leave rounding
        after = {"weight": _sum((t.ww, weight), (t.wm, buffer), (t.wg, gradient), (t.wp, push)), **shared}
        if "buffer" in leaves:
            after["buffer"] = _sum((t.mm, buffer), (t.mw, weight), (t.mg, gradient), (t.mp, push))
    return leaves, after


def _sum(*terms: tuple[float, Tensor]) -> Tensor:
    """The sum of multiples, without those that are 0."""
    summed = [tensor if factor == 1.0 else factor * tensor for factor, tensor in terms if factor]
    return functools.reduce(torch.add, summed) if summed else torch.zeros_like(terms[0][1])


def _clear_roots_at_zero(step: JointStep, found: Iterable[Tensor]) -> None:
    """Entries that never had a gradient give 0 · ∞ under a taught rule: a root has no slope at 0, and there the
    derivative is 0.
    """
    shape = step.tensors[GRADIENT].shape
    state = [tensor == 0 for name, tensor in step.tensors.items() if name != "weight" and tensor.shape == shape]
    never = torch.stack(state).all(0)
    if bool(never.any()):
        for value in found:
            if value.shape[value.ndim - len(shape) :] == shape:  # state of other shapes is no state of the entries
                value.masked_fill_(never & value.isnan(), 0.0)
