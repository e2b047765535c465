"""The target: the number of the model's output that is explained."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError

from .labelled import WORDS, LabelledTarget, LabelledWord, labelled
from .logits import examples_first, logits_of

Target = int | Tensor | tuple[int, int] | LabelledWord | LabelledTarget | Callable[[Any], Tensor] | None


def choose(
    output: Any, target: Target, examples: int, axes: Mapping[torch.Size, int] | None = None
) -> tuple[Float[Tensor, " n"], str]:
    """The number to be explained for each example, and its name.

    ``axes`` holds the axis that counts the examples by the shape of an output; for other shapes it is the first.
    """
    if isinstance(target, LabelledTarget):
        return target.values(output, examples, axes), target.name
    if callable(target) and not isinstance(target, Tensor):
        return _one_per_example(target(output), examples), "the chosen target"
    scores = logits_of(output)
    logits = examples_first(scores, axes or {})
    if isinstance(target, Tensor) and (target.shape != (examples,) or len(logits) != examples):
        raise QueryError(
            f"target holds {tuple(target.shape)} classes for {examples} examples and an output of shape "
            f"{tuple(logits.shape)}; give one class each."
        )
    if len(logits) != examples:
        raise QueryError(
            f"the model's output of shape {tuple(scores.shape)} does not have one line for each of the {examples} "
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
    if isinstance(target, str) and target in WORDS:
        return choose(output, labelled(target, None), examples, axes)  # says that labels are missing
    if isinstance(target, tuple | list | str):
        raise QueryError(
            f"target {target!r} is not understood; give a class, a pair of classes, a tensor with a class for each "
            "example, 'margin' or 'loss' with labels=, or a function of the output."
        )
    return _column(logits, target), f"logit {target}"


def target_key(target: Target) -> Hashable:
    """A key that is equal for targets of the same meaning; None for functions, as what they read may change."""
    if isinstance(target, LabelledTarget):
        return target.word, target_key(target.labels)
    if isinstance(target, Tensor):
        return Tensor, target.dtype, target.shape, tuple(target.flatten().tolist())
    return None if callable(target) or isinstance(target, list) else (type(target), target)


def _column(logits: Float[Tensor, "n classes"], classes: Any) -> Float[Tensor, " n"]:
    """One logit of each example: that of the same class for all, or of one class per example."""
    width, index = logits.shape[1], _integers(classes)
    if index is None or bool(torch.any(index < -width)) or bool(torch.any(index >= width)):
        raise QueryError(f"target {classes!r} is not among the {width} outputs of this model.")
    return logits.gather(1, index.to(logits.device).expand(len(logits)).unsqueeze(1) % width).squeeze(1)


def _integers(classes: Any) -> Tensor | None:
    try:
        index = torch.as_tensor(classes)
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if index.dtype == torch.bool or index.is_floating_point() or index.is_complex() else index.long()


def _one_per_example(scalar: Any, examples: int) -> Float[Tensor, " n"]:
    if not isinstance(scalar, Tensor) or scalar.shape != (examples,):
        shape = tuple(scalar.shape) if isinstance(scalar, Tensor) else type(scalar).__name__
        raise QueryError(f"the target must give one number for each of the {examples} examples; it gave {shape}.")
    return scalar
