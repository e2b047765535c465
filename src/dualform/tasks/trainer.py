"""The loop of Hugging Face's ``Trainer``: its own loss, its collator, its count of the tokens of a step."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn, optim

from dualform.errors import QueryError

from .examples import CollatedRows, RowsOfStep, StepBatch, rows_of_dataset
from .shares import Task, shares_of
from .transformers import (
    IGNORED,
    Rows,
    count_of,
    divided_rows,
    keep_activations,
    next_token_rows,
    sequence_rows,
    token_rows,
)

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = Any

KINDS: dict[str, Rows] = {
    "ForCausalLM": next_token_rows,
    "ForConditionalGeneration": next_token_rows,
    "ForMaskedLM": token_rows,
    "ForTokenClassification": token_rows,
    "ForSequenceClassification": sequence_rows,
    "ForImageClassification": sequence_rows,
    "ForAudioClassification": sequence_rows,
    "ForVideoClassification": sequence_rows,
}
"""By the name that transformers gives a model's loss."""

WAY_OUT = (
    "Pass of_trainer(trainer).data and a function losses(model, batch) of your own: batch.inputs is the collated "
    "batch, batch.all_inputs those of all passes of the step."
)


def of_trainer(trainer: Trainer, *, index: str = "index") -> Task:
    """The task of a ``transformers.Trainer``, before or after it trains.

    The loss is what its ``compute_loss`` gives, divided as its ``training_step`` divides it: by the tokens of all
    batches of a step, or by their number. Label smoothing, autocast and subclasses are its own. A column of the
    training set with the name ``index`` holds the noted indices, else they are places.
    """
    trainer_of: Any = trainer
    dataset = trainer_of.train_dataset
    if dataset is None:
        raise QueryError("this trainer has no train_dataset: pass the trainer that was recorded.")
    places = rows_of_dataset(dataset, None, index).places
    with torch.random.fork_rng(devices=[]):  # a loader may draw a seed
        loader = trainer_of.get_train_dataloader()
    loader = getattr(loader, "base_dataloader", loader)  # accelerate returns a wrapper
    data = RowsOfStep(CollatedRows(loader.dataset, loader.collate_fn, places))

    def losses(model: nn.Module, batch: StepBatch) -> Float[Tensor, " b"]:
        return _losses_in_trainer(trainer_of, model, batch)

    return Task(losses, data)


def optimizer_of(source: Trainer | optim.Optimizer) -> Callable[[list[nn.Parameter]], optim.Optimizer]:
    """For ``memory.replay(…, optimizer=…)``: makes an optimiser of the same class and implementation.

    ``source`` is the optimiser of the loop, or a ``transformers.Trainer``, whose default is a *fused* AdamW: its last
    bits differ from those of the plain one, and a memory does not hold which one it was.
    """
    trainer_of: Any = source
    optimizer = source if isinstance(source, optim.Optimizer) else trainer_of.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    if optimizer is None:
        kind, options = trainer_of.get_optimizer_cls_and_kwargs(trainer_of.args, trainer_of.model)
    else:
        kind, options = type(optimizer), optimizer.defaults
    names = signature(kind).parameters
    return lambda parameters: kind(parameters, **{name: options[name] for name in options if name in names})


def _losses_in_trainer(trainer: Any, model: nn.Module, batch: StepBatch) -> Float[Tensor, " b"]:
    device, passes = trainer.args.device, len(batch.all_inputs)
    _, items = trainer.get_batch_samples(iter(batch.all_inputs), passes, device)
    inputs = trainer._prepare_inputs(dict(batch.inputs))
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor):
        raise QueryError(f"the labels are missing in a batch of {sorted(map(str, inputs))}. {WAY_OUT}")
    kind = _kind_of(model)
    keep_activations(model)
    with trainer.compute_loss_context_manager():
        total, outputs = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=items)
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[1]
        # GPT2LMHeadModel and others whose loss has no name take the default of transformers
        rows_of = kind or (next_token_rows if logits.ndim == 3 else sequence_rows)
        shares = _shares_in_trainer(trainer, rows_of, logits, labels, total, items)
    parts = 1 if _is_divided(trainer, items) else passes
    return shares_of(total / parts, shares / parts, f"This trainer computes another loss. {WAY_OUT}")


def _shares_in_trainer(
    trainer: Any, rows_of: Rows, logits: Tensor, labels: Tensor, total: Tensor, items: Tensor | int | None
) -> Float[Tensor, " b"]:
    counts = [count for count in (items, count_of(rows_of, logits, labels)) if count is not None]
    rows = rows_of(logits, labels)
    if trainer.label_smoother is not None:
        rows = _smoothed(trainer.label_smoother.epsilon, rows_of, rows, logits, labels)
    return divided_rows(rows, total, counts)


def _kind_of(model: Any) -> Rows | None:
    name = getattr(model, "loss_type", None)
    if name is None:
        return None
    rows_of = KINDS.get(name)
    if rows_of is None:
        raise QueryError(
            f"the loss of a {type(model).__name__} ({name}) has no known share of each example: these have, "
            f"{', '.join(KINDS)}. {WAY_OUT}"
        )
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return token_rows if rows_of is next_token_rows and is_encoder_decoder else rows_of


def _smoothed(epsilon: float, rows_of: Rows, rows: Tensor, logits: Tensor, labels: Tensor) -> Float[Tensor, " b"]:
    """Label smoothing as the trainer's own ``LabelSmoother`` does it: (1 − ε) loss + ε mean over all classes."""
    if rows_of is next_token_rows:
        logits, labels = logits[:, :-1], labels[:, 1:]
    over_classes = -logits.log_softmax(-1).mean(-1).masked_fill(labels == IGNORED, 0.0)
    return (1 - epsilon) * rows + epsilon * over_classes.reshape(len(rows), -1).sum(1)


def _is_divided(trainer: Any, items: Tensor | int | None) -> bool:
    """Whether the loss is one over all passes of a step; else ``training_step`` divides it by their number."""
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    if declared is not None:
        return declared
    return trainer.compute_loss_func is not None or (trainer.model_accepts_loss_kwargs and items is not None)
