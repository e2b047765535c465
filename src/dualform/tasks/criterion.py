"""A loss of a batch, and what each example contributes to it: torch's loss modules, or a function."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.arguments import one_of
from dualform.errors import QueryError

from .shares import shares_of

LossReduction = Literal["mean", "sum"]
LossName = Literal["cross_entropy", "binary_cross_entropy"]
LossFunction = Callable[[Any, Tensor], Tensor]
"""Of outputs and labels: a loss module of torch, or a function that gives one loss an example (or an entry)."""


@dataclass(frozen=True)
class Criterion:
    """Shares of what a loop backpropagates: a loss, divided by ``accumulate``."""

    function: LossFunction
    reduction: str
    accumulate: float = 1
    as_output: bool = False
    """Give the labels the type and the shape of the output first."""

    def __call__(self, outputs: Any, labels: Tensor, total: Tensor | None = None) -> Float[Tensor, " b"]:
        """The shares of the examples; ``total`` is the loss where the loop's own code has computed it already."""
        if self._is_plain_cross_entropy(outputs, labels, total):
            shares = F.cross_entropy(outputs, labels, reduction="none")
            return shares / len(labels) if self.reduction == "mean" else shares
        if self.as_output:
            labels = labels_like(outputs, labels)
        entries = self._entries(outputs, labels)
        total = self._total(outputs, labels, entries) if total is None else total
        shares = entries.flatten(1).sum(1) if entries.ndim > 1 else entries
        return shares_of(
            total / self.accumulate,
            shares / (self._divisor(labels, entries) * self.accumulate),
            "The loop must backpropagate loss= and nothing else, and it must add up over examples; otherwise write "
            "losses(model, batch) yourself.",
        )

    def _is_plain_cross_entropy(self, outputs: Any, labels: Tensor, total: Tensor | None) -> bool:
        """Whether the gradient of the shares is that of the loop's loss bit for bit, without more ado."""
        function: Any = self.function
        return (
            isinstance(function, nn.CrossEntropyLoss)
            and type(function) is nn.CrossEntropyLoss  # a subclass may compute something else
            and function.weight is None
            and function.label_smoothing == 0.0
            and (total, self.accumulate) == (None, 1)
            and isinstance(outputs, Tensor)
            and (outputs.ndim, labels.ndim) == (2, 1)
            and len(outputs) == len(labels) > 0
            and not labels.is_floating_point()
            and not bool((labels == function.ignore_index).any())
        )

    def _entries(self, outputs: Any, labels: Tensor) -> Tensor:
        function: Any = self.function
        if isinstance(function, nn.Module):
            function = copy.copy(function)
            function.__dict__["reduction"] = "none"
        entries = function(outputs, labels)
        if not isinstance(entries, Tensor) or entries.ndim == 0 or len(entries) != len(labels):
            shape = tuple(entries.shape) if isinstance(entries, Tensor) else type(entries).__name__
            raise QueryError(
                f"loss= gave {shape} for {len(labels)} examples: it must give one loss an example "
                '(reduction="none"), or be a loss module of torch.'
            )
        return entries

    def _total(self, outputs: Any, labels: Tensor, entries: Tensor) -> Tensor:
        """The loss in the loop's own words, so that it rounds as there."""
        if isinstance(self.function, nn.Module) and getattr(self.function, "reduction", "none") != "none":
            return self.function(outputs, labels)
        return entries.sum() if self.reduction == "sum" else entries.mean()

    def _divisor(self, labels: Tensor, entries: Tensor) -> Tensor | float:
        if self.reduction == "sum":
            return 1.0
        if self.reduction == "batchmean":
            return len(entries)
        if isinstance(self.function, nn.CrossEntropyLoss | nn.NLLLoss) and not labels.is_floating_point():
            return _weight_of(self.function, labels)
        return entries.numel()


def _weight_of(function: nn.CrossEntropyLoss | nn.NLLLoss, labels: Tensor) -> Tensor:
    """What torch divides a mean by: the weights of all labels that count."""
    counted = labels[labels != function.ignore_index]
    return torch.tensor(len(counted)) if function.weight is None else function.weight[counted].sum()


def classification_loss(
    loss: LossName | LossFunction, reduction: LossReduction, accumulate: float, **options: Any
) -> Criterion:
    """A criterion by name with options, or as it is."""
    one_of("reduction", reduction, ("mean", "sum"))
    options = {name: value for name, value in options.items() if value is not None}
    if loss == "cross_entropy":
        return Criterion(nn.CrossEntropyLoss(reduction=reduction, **options), reduction, accumulate)
    if options:
        raise QueryError(
            f"{sorted(options)} are options of loss='cross_entropy'. Pass a loss module with its own options, such as "
            "loss=nn.BCEWithLogitsLoss(pos_weight=…)."
        )
    if loss == "binary_cross_entropy":
        return Criterion(nn.BCEWithLogitsLoss(reduction=reduction), reduction, accumulate, as_output=True)
    if isinstance(loss, str):
        raise QueryError(
            f"loss={loss!r} is not known; choose 'cross_entropy' or 'binary_cross_entropy', or pass a loss module or a "
            "function of (outputs, labels)."
        )
    return criterion_of(loss, reduction, accumulate)


def criterion_of(loss: LossFunction, reduction: LossReduction, accumulate: float) -> Criterion:
    """A loss of the user's; a module says itself how it reduces."""
    own = getattr(loss, "reduction", "none") if isinstance(loss, nn.Module) else "none"
    return Criterion(loss, reduction if own == "none" else own, accumulate)


def labels_like(outputs: Tensor, labels: Tensor) -> Tensor:
    """The labels as numbers of the output's type; torch would broadcast (b,) against (b, 1) to (b, b)."""
    if labels.numel() != outputs.numel():
        raise QueryError(
            f"the output has shape {tuple(outputs.shape)} and the labels {tuple(labels.shape)}: there must be one "
            "label for each output."
        )
    return labels.to(outputs.dtype).reshape(outputs.shape)
