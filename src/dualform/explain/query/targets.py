"""The target: which number of the output is explained."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError

Target = int | Tensor | tuple[int, int] | Callable[[Any], Tensor] | None


def choose(
    output: Any, target: Target, examples: int, axes: Mapping[torch.Size, int] | None = None
) -> tuple[Float[Tensor, " n"], str]:
    """The number of each example that is to be explained, and its name.

    ``axes`` says for outputs of some shapes which axis counts the examples; else it is the first.
    """
    if callable(target) and not isinstance(target, Tensor):
        return _one_each(target(output), examples), "the chosen target"
    found = logits_of(output)
    logits = examples_first(found, axes or {})
    if isinstance(target, Tensor) and (target.shape != (examples,) or len(logits) != examples):
        raise QueryError(
            f"target holds {tuple(target.shape)} classes for {examples} examples and an output of shape "
            f"{tuple(logits.shape)}; give one class each."
        )
    if len(logits) != examples:
        raise QueryError(
            f"the model's output of shape {tuple(found.shape)} does not have one line for each of the {examples} "
            "examples. If the inputs are one example without an axis of examples, put one first: x[None]. Else pass "
            "target=lambda output: … that gives one number an example."
        )
    if isinstance(target, Tensor):
        return _column(logits, target), "the logit of the given class"
    if target is None:
        name = "the output" if logits.shape[1] == 1 else "the logit of the predicted class"
        return _column(logits, logits.detach().argmax(1)), name
    if isinstance(target, tuple) and len(target) == 2:
        return _column(logits, target[0]) - _column(logits, target[1]), f"logit {target[0]} − logit {target[1]}"
    if isinstance(target, tuple | list | str):
        raise QueryError(
            f"target {target!r} is none; give a class, a pair of classes, a tensor with a class for each example, or "
            "a function of the output."
        )
    return _column(logits, target), f"logit {target}"


def target_key(target: Target) -> Hashable:
    """The same for targets that mean the same. Functions have none: what they read may change."""
    if isinstance(target, Tensor):
        return Tensor, target.dtype, target.shape, tuple(target.flatten().tolist())
    return None if callable(target) or isinstance(target, list) else (type(target), target)


def logits_of(output: Any) -> Tensor:
    """The tensor of scores in whatever a model returns."""
    if isinstance(output, Tensor):
        found = output
    else:
        found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        if found is None and isinstance(output, tuple | list):
            found = _only_scores(output)
    if not isinstance(found, Tensor) or found.ndim == 0:
        what = "number" if isinstance(found, Tensor) else type(output).__name__
        raise QueryError(
            f"cannot find the logits in a {what}; pass target=lambda output: … that gives one number an example."
        )
    return found


def _only_scores(output: Sequence[Any]) -> Tensor | None:
    """The one entry of a tuple that can be logits: a loss is a number, a state a tuple. Of several none is guessed."""
    places = [i for i, part in enumerate(output) if isinstance(part, Tensor) and part.is_floating_point() and part.ndim]
    if len(places) > 1:
        shapes = ", ".join(f"output[{i}] {tuple(output[i].shape)}" for i in places)
        raise QueryError(
            f"the model gives a {type(output).__name__} in which several tensors could be the logits: {shapes}. Say "
            f"which number is to be explained: target=lambda output: output[{places[-1]}][:, 3] for class 3."
        )
    return output[places[0]] if places else None


def examples_first(logits: Tensor, axes: Mapping[torch.Size, int]) -> Float[Tensor, "n classes"]:
    """One line an example; of a sequence the last position."""
    axis = axes.get(logits.shape, 0)
    if logits.ndim > axis + 1:
        logits = logits.movedim(axis, 0)
    while logits.ndim > 2:
        logits = logits[:, -1]
    return logits.unsqueeze(1) if logits.ndim == 1 else logits


def _column(logits: Float[Tensor, "n classes"], which: Any) -> Float[Tensor, " n"]:
    """One logit of each example: the same for all, or a tensor that says which."""
    width, index = logits.shape[1], _whole_numbers(which)
    if index is None or bool(torch.any(index < -width)) or bool(torch.any(index >= width)):
        raise QueryError(f"target {which!r} is not among the {width} outputs of this model.")
    return logits.gather(1, index.to(logits.device).expand(len(logits)).unsqueeze(1) % width).squeeze(1)


def _whole_numbers(which: Any) -> Tensor | None:
    try:
        index = torch.as_tensor(which)
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if index.dtype == torch.bool or index.is_floating_point() or index.is_complex() else index.long()


def _one_each(scalar: Any, examples: int) -> Float[Tensor, " n"]:
    if not isinstance(scalar, Tensor) or scalar.shape != (examples,):
        shape = tuple(scalar.shape) if isinstance(scalar, Tensor) else type(scalar).__name__
        raise QueryError(f"the target must give one number for each of the {examples} examples; it gave {shape}.")
    return scalar
