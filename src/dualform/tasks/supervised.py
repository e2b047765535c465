"""Loops of the form ``loss(model(x), y).backward()``."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import QueryError

from .criterion import Criterion, LossFunction, LossName, LossReduction, classification_loss, criterion_of
from .examples import Collate, TensorRows, on_batch, rows_of_dataset, split_batch, to_device
from .shares import Task

Split = Callable[[Any], tuple[Any, Tensor]]
"""Inputs and labels of a batch."""


def classification(
    inputs: Any,
    labels: Tensor | None = None,
    *,
    loss: LossName | LossFunction = "cross_entropy",
    reduction: LossReduction = "mean",
    weight: Float[Tensor, " classes"] | None = None,
    label_smoothing: float | None = None,
    ignore_index: int | None = None,
    accumulate: float = 1,
    collate: Collate | None = None,
    split: Split = split_batch,
    index: str | None = None,
) -> Task:
    """The task of a classifier: of ``inputs`` and ``labels`` as tensors, or of a data set or loader of (input, label).

    ``loss`` is cross entropy of logits, binary cross entropy of logits, a loss module of torch, or a function of
    (outputs, labels) that gives one loss an example. ``weight`` (of classes), ``label_smoothing`` and ``ignore_index``
    are those of :class:`torch.nn.CrossEntropyLoss`: a mean with weights is divided by their sum. ``accumulate`` is what
    the loop divides the loss of each backward pass by.

    The noted index is an example's place in the data, or the value of the column ``index`` of a data set.
    ``collate`` makes a batch of examples as the loop's loader did; ``split`` takes inputs and labels from it.
    """
    criterion = classification_loss(
        loss, reduction, accumulate, weight=weight, label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    return _supervised(inputs, labels, criterion, collate, split, index)


def regression(
    inputs: Any,
    labels: Tensor | None = None,
    *,
    loss: LossFunction | None = None,
    reduction: LossReduction = "mean",
    accumulate: float = 1,
    collate: Collate | None = None,
    split: Split = split_batch,
    index: str | None = None,
) -> Task:
    """The task of a regression: squared errors, their mean over all outputs of a batch.

    ``loss`` is another loss module of torch, or a function of (outputs, labels) that gives one loss an example or an
    output. All else is as in :func:`classification`.
    """
    criterion = (
        Criterion(nn.MSELoss(reduction=reduction), reduction, accumulate, as_output=True)
        if loss is None
        else criterion_of(loss, reduction, accumulate)
    )
    return _supervised(inputs, labels, criterion, collate, split, index)


def _supervised(
    inputs: Any, labels: Tensor | None, criterion: Criterion, collate: Collate | None, split: Split, index: str | None
) -> Task:  # fmt: skip
    def losses(model: nn.Module, batch: Any) -> Float[Tensor, " b"]:
        x, y = to_device(split(batch), model)
        return criterion(on_batch(model, x), y)

    if labels is not None:
        return Task(losses, TensorRows(inputs, labels))
    if isinstance(inputs, Tensor):
        raise QueryError(
            "the labels are missing: pass both tensors, classification(x, y), or a data set of (input, label)."
        )
    return Task(losses, rows_of_dataset(inputs, collate, index))
