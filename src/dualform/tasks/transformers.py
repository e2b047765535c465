"""Loops on models of Hugging Face that compute their own loss: ``model(**batch).loss.backward()``.

Nothing is imported from transformers here: a model's outputs have a loss and logits, and the batch has labels.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.arguments import one_of
from dualform.errors import QueryError

from .examples import Collate, RowsOfStep, StepBatch, rows_of_dataset, to_device
from .shares import Task, shares_of

IGNORED = -100
"""The label of a token that does not count."""

Rows = Callable[[Tensor, Tensor], Float[Tensor, " b"]]
"""Of a model's logits and the labels: what each example adds to the loss, before it is divided."""


def causal_lm(
    dataset: Any,
    collator: Collate | None = None,
    *,
    index: str = "index",
    tokens_of: Literal["batch", "step"] = "batch",
    accumulate: float = 1,
) -> Task:
    """The task of a language model: each token predicts the next one, the mean is over the tokens of the batch.

    ``dataset`` has rows of token ids, or mappings that the ``collator`` takes; without one, rows must be equally long,
    and their labels are their ids. ``tokens_of="step"`` divides by the tokens of all passes of a step instead.
    ``accumulate`` is what the loop divides the loss of each backward pass by. A column of the data set with the name
    ``index`` holds the noted indices, else they are places.
    """
    one_of("tokens_of", tokens_of, ("batch", "step"))
    data = RowsOfStep(rows_of_dataset(dataset, collator, index, _collate_tokens))

    def losses(model: nn.Module, batch: StepBatch) -> Float[Tensor, " b"]:
        tokens = sum((_labels_in(other)[..., 1:] != IGNORED).sum() for other in batch.all_inputs)
        return _model_losses(model, batch.inputs, next_token_rows, accumulate, tokens if tokens_of == "step" else None)

    return Task(losses, data)


def sequence_classification(
    dataset: Any, collator: Collate | None = None, *, index: str = "index", accumulate: float = 1
) -> Task:  # fmt: skip
    """The task of a model that gives one answer a sequence: classes, several labels at once, or numbers.

    The model decides by its ``problem_type``. All else is as in :func:`causal_lm`; without a ``collator`` the rows are
    mappings of equally long tensors or lists.
    """

    def losses(model: nn.Module, batch: Any) -> Float[Tensor, " b"]:
        return _model_losses(model, batch, sequence_rows, accumulate, None)

    return Task(losses, rows_of_dataset(dataset, collator, index, _collate_tokens))


def _model_losses(
    model: nn.Module, batch: Any, rows_of: Rows, accumulate: float, tokens: Tensor | int | None
) -> Float[Tensor, " b"]:
    labels = _labels_in(batch)
    batch = to_device(_taken_by(model, batch), model)
    keep_activations(model)
    outputs = model(**batch) if tokens is None else model(**batch, num_items_in_batch=tokens)
    logits = outputs.logits
    rows = rows_of(logits, labels.to(logits.device))
    shares = divided_rows(rows, outputs.loss, [count_of(rows_of, logits, labels) if tokens is None else tokens])
    return shares_of(
        outputs.loss / accumulate,
        shares / accumulate,
        "The model adds something else to its loss (such as a loss of routers), or its loss is of another kind.",
    )


def keep_activations(model: Any) -> None:
    """Turn gradient checkpointing off on the copy that runs again: the values are the same bits, and passes that are
    differentiated twice cannot be checkpointed.
    """
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()


# ------------------------------------------------------------------------------------------- kinds of losses


def next_token_rows(logits: Float[Tensor, "b n classes"], labels: Int[Tensor, "b n"]) -> Float[Tensor, " b"]:
    """Cross entropy of each sequence, summed over tokens that predict the next one."""
    return _token_rows(logits[:, :-1], labels[:, 1:])


def token_rows(logits: Float[Tensor, "b n classes"], labels: Int[Tensor, "b n"]) -> Float[Tensor, " b"]:
    """Cross entropy of each sequence, summed over its labelled tokens (masked words, classes of tokens)."""
    return _token_rows(logits, labels)


def sequence_rows(logits: Float[Tensor, "b classes"], labels: Tensor) -> Float[Tensor, " b"]:
    """Loss of each sequence: squared errors of numbers, cross entropy of a class, binary cross entropy of labels."""
    logits = _precise(logits)
    if is_numeric(logits):
        return (logits - labels.reshape(logits.shape).to(logits.dtype)).square().flatten(1).sum(1)
    if labels.is_floating_point():
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").sum(1)
    return F.cross_entropy(logits, labels.reshape(-1), reduction="none")


def is_numeric(logits: Tensor) -> bool:
    """Whether a sequence's answer is one number."""
    return logits.shape[-1] == 1


def count_of(rows_of: Rows, logits: Tensor, labels: Tensor) -> int | Tensor:
    """What a mean over a batch is divided by."""
    if rows_of is next_token_rows:
        return (labels[:, 1:] != IGNORED).sum()
    if rows_of is token_rows:
        return (labels != IGNORED).sum()
    return logits.numel() if is_numeric(logits) or labels.is_floating_point() else len(labels)


def divided_rows(
    rows: Float[Tensor, " b"], total: Tensor, counts: Sequence[Tensor | int]
) -> Float[Tensor, " b"]:  # fmt: skip
    """The rows over the first count that makes them sum to the total; over the first one if none does."""
    candidates = [rows / count for count in counts]
    near = [shares for shares in candidates if torch.isclose(shares.sum().detach(), total.detach().to(shares), 1e-3)]
    return (near or candidates)[0]


def _token_rows(logits: Float[Tensor, "b n classes"], labels: Int[Tensor, "b n"]) -> Float[Tensor, " b"]:
    entries = F.cross_entropy(_precise(logits).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return entries.reshape(labels.shape).sum(1)


def _precise(logits: Tensor) -> Tensor:
    """Half precision becomes float32, as in the losses of transformers."""
    return logits if logits.dtype == torch.float64 else logits.float()


# ------------------------------------------------------------------------------------------- batches


def _labels_in(batch: Any) -> Tensor:
    if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), Tensor):
        content = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise QueryError(
            f"the labels are missing: a batch must be a mapping with 'labels', and here it is {content}. Pass the "
            "collator of the loop: it makes them."
        )
    return batch["labels"]


def _taken_by(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a batch that the model knows; the others, such as its index, were taken out by the loop."""
    base: Any = model
    forward = base.get_base_model().forward if hasattr(base, "get_base_model") else base.forward
    names = signature(forward).parameters
    return {name: value for name, value in batch.items() if name in names}


def _collate_tokens(examples: list[Any]) -> dict[str, Tensor]:
    """Rows of equal length, stacked; the labels of token ids are the ids themselves."""
    rows = [example if isinstance(example, Mapping) else {"input_ids": example} for example in examples]
    columns = {name: [row[name] for row in rows] for name in rows[0] if not isinstance(rows[0][name], str)}
    try:
        batch = {name: torch.stack([torch.as_tensor(value) for value in values]) for name, values in columns.items()}
    except RuntimeError as error:
        lengths = sorted({len(row["input_ids"]) for row in rows})
        raise QueryError(
            f"rows of {lengths[0]} to {lengths[-1]} tokens cannot be stacked: pass the collator that padded them in "
            "the loop."
        ) from error
    if "labels" not in batch and "label" in batch:
        batch["labels"] = batch.pop("label")
    return {**batch, "labels": batch.get("labels", batch["input_ids"])}
