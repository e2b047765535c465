"""One forward pass gives the query of every recorded layer; one backward pass of a target gives the directions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from dualform.errors import ModelMismatch, QueryError

Target = int | Tensor | tuple[int, int] | Callable[[Any], Tensor] | None


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
    seen: Mapping[str, Seen]


def run(model: nn.Module, inputs: Any, weights: Mapping[str, Tensor] | None) -> Any:
    """The model's output, with its own weights or the given ones."""
    args, kwargs = (
        (inputs, {}) if isinstance(inputs, tuple) else ((), inputs) if isinstance(inputs, Mapping) else ((inputs,), {})
    )
    return model(*args, **kwargs) if weights is None else functional_call(model, dict(weights), args, dict(kwargs))


def count_examples(inputs: Any) -> int:
    """How many examples the inputs hold: the length of the first tensor."""
    parts = inputs if isinstance(inputs, tuple) else inputs.values() if isinstance(inputs, Mapping) else (inputs,)
    for part in parts:
        if isinstance(part, Tensor) and part.ndim:
            return part.shape[0]
    raise QueryError(f"the inputs must hold a tensor with a first axis of examples; got {type(inputs).__name__}.")


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
    model: nn.Module, inputs: Any, widths: Mapping[str, int], weights: Mapping[str, Tensor] | None, target: Target
) -> Capture:  # fmt: skip
    """Run the model and its target backwards; note what the modules (name → input width) saw."""
    seen: dict[str, tuple[list[Tensor], list[Tensor]]] = {name: ([], []) for name in widths}
    modules = dict(model.named_modules())
    if missing := [name for name in widths if name not in modules]:
        raise ModelMismatch(
            f"this {type(model).__name__} has no layer '{missing[0]}', which the memory recorded. "
            "Pass the model that was trained."
        )
    handles = []
    for name, width in widths.items():
        handles.append(modules[name].register_forward_pre_hook(partial(_check_width, name, width), with_kwargs=True))
        handles.append(modules[name].register_forward_hook(partial(_keep, *seen[name]), with_kwargs=True))
    try:
        with evaluating(model), torch.enable_grad():
            output = run(model, inputs, weights)
            scalar, described = choose(output, target, count_examples(inputs))
            outputs = [z for _, zs in seen.values() for z in zs]
            grads = (
                torch.autograd.grad(scalar.sum(), outputs, allow_unused=True)
                if scalar.requires_grad
                else [None] * len(outputs)
            )
    finally:
        for handle in handles:
            handle.remove()
    directions = iter([torch.zeros_like(z) if g is None else g.detach() for g, z in zip(grads, outputs, strict=True)])
    return Capture(
        _detached(output), described,
        {name: Seen([x.detach() for x in xs], [z.detach() for z in zs], [next(directions) for _ in zs])
         for name, (xs, zs) in seen.items()},
    )  # fmt: skip


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


def logits_of(output: Any) -> Tensor:
    """The tensor of scores in whatever a model returns."""
    if isinstance(output, Tensor):
        return output
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        raise QueryError(
            f"cannot find the logits in a {type(output).__name__}; "
            "pass target=lambda output: … that gives one number an example."
        )
    return found


def choose(output: Any, target: Target, examples: int) -> tuple[Float[Tensor, " n"], str]:
    """The number of each example that is to be explained, and its name."""
    if callable(target) and not isinstance(target, Tensor):
        scalar = target(output)
        if not isinstance(scalar, Tensor) or scalar.shape != (examples,):
            shape = tuple(scalar.shape) if isinstance(scalar, Tensor) else type(scalar).__name__
            raise QueryError(f"the target must give one number for each of the {examples} examples; it gave {shape}.")
        return scalar, "the chosen target"
    logits = logits_of(output)
    if logits.ndim == 1:
        return logits, "the output"
    while logits.ndim > 2:  # sequences: the last position
        logits = logits[:, -1]
    width = logits.shape[1]

    def column(which: Any) -> Tensor:
        index = torch.as_tensor(which, device=logits.device)
        if index.is_floating_point() or bool((index < -width).any()) or bool((index >= width).any()):
            raise QueryError(f"target {which!r} is not among the {width} outputs of this model.")
        return logits.gather(1, index.expand(logits.shape[0]).unsqueeze(1) % width).squeeze(1)

    if target is None:
        return column(logits.detach().argmax(1)), "the logit of the predicted class"
    if isinstance(target, tuple):
        return column(target[0]) - column(target[1]), f"logit {target[0]} − logit {target[1]}"
    if isinstance(target, Tensor) and target.shape != (examples,):
        raise QueryError(f"target holds {tuple(target.shape)} classes for {examples} examples; give one class each.")
    return column(target), "the logit of the given class" if isinstance(target, Tensor) else f"logit {target}"


def _detached(output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) else output
