"""The scores in whatever a model returns, one line an example."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError


def logits_of(output: Any) -> Tensor:
    """The tensor of scores in whatever a model returns."""
    if isinstance(output, Tensor):
        logits = output
    else:
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        if logits is None and isinstance(output, tuple | list):
            logits = _only_scores(output)
    if not isinstance(logits, Tensor) or logits.ndim == 0:
        kind = "number" if isinstance(logits, Tensor) else type(output).__name__
        raise QueryError(
            f"cannot find the logits in a {kind}; pass target=lambda output: … that gives one number an example."
        )
    return logits


def _only_scores(output: Sequence[Any]) -> Tensor | None:
    """The only entry of a tuple that can be the logits; a loss is a number, and a state is a tuple."""
    places = [i for i, part in enumerate(output) if isinstance(part, Tensor) and part.is_floating_point() and part.ndim]
    if len(places) > 1:
        shapes = ", ".join(f"output[{i}] {tuple(output[i].shape)}" for i in places)
        raise QueryError(
            f"the model gives a {type(output).__name__} in which several tensors could be the logits: {shapes}. Say "
            f"which number is to be explained: target=lambda output: output[{places[-1]}][:, 3] for class 3."
        )
    return output[places[0]] if places else None


def examples_first(logits: Tensor, axes: Mapping[torch.Size, int]) -> Float[Tensor, "n classes"]:
    """Logits with one line per example; for sequences those of the last position."""
    axis = axes.get(logits.shape, 0)
    if logits.ndim > axis + 1:
        logits = logits.movedim(axis, 0)
    while logits.ndim > 2:
        logits = logits[:, -1]
    return logits.unsqueeze(1) if logits.ndim == 1 else logits
