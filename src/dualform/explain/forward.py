"""One forward pass gives the query of every recorded layer; one backward pass of a target gives the directions."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dualform.errors import ModelMismatch, QueryError
from dualform.types import LayerInfo

from .examples import count_examples
from .targets import Target, choose


@dataclass(frozen=True)
class Seen:
    """What one module saw: its inputs and outputs, call by call, and the target's gradient at the outputs."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    directions: Sequence[Tensor]


@dataclass(frozen=True)
class Capture:
    """One pass of a network over the queries."""

    output: Any
    target: str
    examples: int
    seen: Mapping[str, Seen]


def run(model: nn.Module, inputs: Any, weights: Mapping[str, Tensor] | None) -> Any:
    """The model's output, with its own weights or the given ones."""
    args, kwargs = (
        (inputs, {}) if isinstance(inputs, tuple) else ((), inputs) if isinstance(inputs, Mapping) else ((inputs,), {})
    )
    return model(*args, **kwargs) if weights is None else functional_call(model, dict(weights), args, dict(kwargs))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off and running statistics fixed while we ask; as it was afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def capture(
    model: nn.Module, inputs: Any, layers: Mapping[str, LayerInfo], weights: Mapping[str, Tensor] | None, target: Target
) -> Capture:  # fmt: skip
    """Run the model and its target backwards; note what the modules (name → recorded layer) saw."""
    inputs_of: dict[str, list[Tensor]] = {name: [] for name in layers}
    outputs_of: dict[str, list[Tensor]] = {name: [] for name in layers}
    modules = dict(model.named_modules())
    if missing := [name for name in layers if name not in modules]:
        raise ModelMismatch(
            f"this {type(model).__name__} has no layer '{missing[0]}', which the memory recorded. "
            "Pass the model that was trained."
        )
    handles = []
    for name, info in layers.items():
        check, keep = partial(_check_width, name, info.d_in), partial(_keep, inputs_of[name], outputs_of[name])
        handles.append(modules[name].register_forward_pre_hook(check, with_kwargs=True))
        handles.append(modules[name].register_forward_hook(keep, with_kwargs=True))
    try:
        with evaluating(model), torch.enable_grad():
            output = run(model, inputs, weights)
            examples = count_examples(inputs, layers, inputs_of)
            axes = {z.shape: layers[name].batch_dim for name, zs in outputs_of.items() for z in zs}
            scalar, described = choose(output, target, examples, axes)
            directions = _directions(scalar, outputs_of)
    finally:
        for handle in handles:
            handle.remove()
    seen = {name: Seen(_all(inputs_of[name]), _all(outputs_of[name]), directions[name]) for name in layers}
    return Capture(_detached(output), described, examples, seen)


def _directions(scalar: Tensor, outputs_of: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    """The gradient of the target at every output; zero where the target does not depend on it."""
    outputs = [z for zs in outputs_of.values() for z in zs]
    grads: Sequence[Tensor | None] = [None] * len(outputs)
    if scalar.requires_grad and outputs:
        grads = torch.autograd.grad(scalar.sum(), outputs, allow_unused=True)
    found = iter([torch.zeros_like(z) if g is None else g.detach() for g, z in zip(grads, outputs, strict=True)])
    return {name: [next(found) for _ in zs] for name, zs in outputs_of.items()}


def _all(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors]


def _check_width(name: str, width: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
    x = args[0] if args else kwargs["input"]
    if x.shape[-1] != width:
        raise QueryError(
            f"layer '{name}' takes {width} numbers a row, but the query has {x.shape[-1]} (shape {tuple(x.shape)})."
        )


def _keep(
    inputs: list[Tensor], outputs: list[Tensor], module: nn.Module, args: tuple, kwargs: dict, output: Tensor
) -> Tensor:
    inputs.append(args[0] if args else kwargs["input"])
    kept = output if output.requires_grad else output.detach().requires_grad_()
    outputs.append(kept)
    return kept.clone()  # so that an in-place activation does not touch what was kept


def _detached(output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) else output
