"""Loops of Lightning: the module's own ``training_step``.

A ``training_step`` gives one number, and an example's share of it is needed. Either the module has a method
``losses(batch)`` that gives the shares, or the step is one loss of the outputs of ``self(inputs)``, such as cross
entropy: the step runs as it is, its outputs are noted on the way, and the shares must sum to what it returned.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import QueryError

from .criterion import Criterion, LossFunction, LossName, classification_loss
from .examples import Collate, rows_of_dataset, split_batch, to_device
from .shares import Task
from .supervised import Split


def lightning(
    module: nn.Module,
    dataset: Any,
    *,
    loss: LossName | LossFunction = "cross_entropy",
    accumulate: float | None = None,
    collate: Collate | None = None,
    split: Split = split_batch,
    index: str | None = None,
) -> Task:
    """The task of a ``LightningModule`` on a data set, or on the loader that it was trained with.

    If the module has a method ``losses(batch)``, that gives each example's share of what ``training_step`` returns.
    Else ``training_step`` must return ``loss`` (cross entropy, a loss module of torch, or a function of outputs and
    labels, as in :func:`dualform.tasks.classification`) of ``self(inputs)``, called once. ``accumulate`` is the
    trainer's ``accumulate_grad_batches``, taken from the module's trainer where there is one.
    """
    parts = _accumulated(module) if accumulate is None else accumulate
    criterion = classification_loss(loss, "mean", parts)
    if not hasattr(module, "losses") and not hasattr(module, "training_step"):
        raise QueryError(
            f"a {type(module).__name__} has neither training_step nor losses(batch). Pass a LightningModule, or use "
            "dualform.tasks.classification."
        )

    def losses(model: nn.Module, batch: Any) -> Float[Tensor, " b"]:
        batch = to_device(batch, model)
        own: Any = getattr(model, "losses", None)
        return own(batch) / parts if own is not None else _losses_of_step(model, batch, criterion, split)

    return Task(losses, rows_of_dataset(dataset, collate, index))


def _accumulated(module: nn.Module) -> float:
    trainer = getattr(module, "_trainer", None)
    return getattr(trainer, "accumulate_grad_batches", 1)


def _losses_of_step(model: Any, batch: Any, criterion: Criterion, split: Split) -> Float[Tensor, " b"]:
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with _silent(model):
            result = model.training_step(batch, 0)
    finally:
        handle.remove()
    total = result.get("loss") if isinstance(result, Mapping) else result
    name = type(model).__name__
    if not isinstance(total, Tensor):
        raise QueryError(f"training_step of {name} returned a {type(total).__name__}, no loss.")
    if len(outputs) != 1:
        raise QueryError(
            f"training_step of {name} called self(…) {len(outputs)} times, so the outputs of its examples are not "
            "known. Give the module a method losses(batch): each example's share of the loss, which sum to it."
        )
    return criterion(outputs[0], split(batch)[1], total)


@contextmanager
def _silent(model: Any) -> Iterator[None]:
    """A step without a trainer: what it logs goes nowhere."""
    for name in ("log", "log_dict"):
        model.__dict__[name] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            del model.__dict__[name]
