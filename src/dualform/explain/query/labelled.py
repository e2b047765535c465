"""Targets that need to know the right answer: the margin of a class over all others, and the loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import QueryError

from .logits import examples_first, logits_of

LabelledWord = Literal["margin", "loss"]
WORDS: tuple[LabelledWord, ...] = ("margin", "loss")

IGNORED = -100
"""The label of a position that does not count, as in torch's cross entropy."""


@dataclass(frozen=True, eq=False)
class LabelledTarget:
    r"""The margin or the loss of given labels: one class an example, or one a position (b, n) of a sequence.

    .. math:: \mathrm{loss} = \log \sum_j e^{z_j} - z_y, \qquad \mathrm{margin} = z_y - \log \sum_{j \ne y} e^{z_j}

    The margin is the log odds of the class y. Of the positions of a sequence the mean is taken.
    """

    word: LabelledWord
    labels: Int[Tensor, "*positions"]

    @property
    def name(self) -> str:
        """What contributions add to."""
        return "the loss of the given label" if self.word == "loss" else "the margin of the given class (its log odds)"

    def values(
        self, output: Any, examples: int, axes: Mapping[torch.Size, int] | None = None
    ) -> Float[Tensor, " examples"]:
        """The number of each example."""
        logits = logits_of(output)
        if self.labels.ndim < 2:
            logits = examples_first(logits, axes or {})
        labels = self.labels.to(logits.device)
        if labels.shape != logits.shape[:-1] or len(labels) != examples:
            raise QueryError(
                f"labels have shape {tuple(labels.shape)} for {examples} examples and logits of shape "
                f"{tuple(logits.shape)}: give one class an example, or one a position of the output."
            )
        classes, counts = logits.shape[-1], labels != IGNORED
        if classes < 2:
            raise QueryError(
                f"target={self.word!r} is about classes, and this model gives one number an example. Pass a function "
                "of the output: target=lambda output: -(output[:, 0] - y) ** 2."
            )
        wrong = counts & ((labels < 0) | (labels >= classes))
        if bool(wrong.any()):
            raise QueryError(f"the label {int(labels[wrong][0])} is not among the {classes} outputs of this model.")
        place = torch.where(counts, labels, 0)[..., None]
        right = logits.gather(-1, place)[..., 0]
        if self.word == "loss":
            values = logits.logsumexp(-1) - right
        else:
            values = right - logits.scatter(-1, place, float("-inf")).logsumexp(-1)
        values, counts = torch.where(counts, values, 0.0).reshape(examples, -1), counts.reshape(examples, -1)
        return values.sum(1) / counts.sum(1).clamp(min=1)


def labelled(target: Any, labels: Any) -> Any:
    """The target that a word stands for, with these labels; any other target, without labels, as it is."""
    if not isinstance(target, str) or target not in WORDS:
        if labels is not None:
            raise QueryError(f"labels= goes with target='margin' or target='loss', and target is {target!r}.")
        return target
    if labels is None:
        raise QueryError(
            f"target={target!r} needs to know the right answers: pass labels=, one class an example (or one a position "
            "of a sequence, not shifted)."
        )
    tensor = torch.as_tensor(labels)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise QueryError(f"labels hold {tensor.dtype}; give classes, as whole numbers.")
    return LabelledTarget(target, tensor.detach().long().clone())
