"""What the network said about each example while it was trained, read from the errors of its last layer."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.engine import StoreView, stream
from dualform.errors import QueryError
from dualform.progress import OnProgress
from dualform.store import Store
from dualform.types import LayerInfo

from .training_set import TrainingSet

FOREIGN = 0.25
"""The share of the errors under another label from which on the labels cannot be those of the training."""

UNEVEN = 0.05
"""How far the errors of a softmax may sum from zero, relative to their size: rounding."""


def training_labels(
    store: Store, view: StoreView, layer: LayerInfo, training: TrainingSet, classes: int, watch: OnProgress | None
) -> Float[Tensor, "n classes"] | str:
    r"""The mean probability of each class over the visits of each example, at the moment of the visit.

    Or the reason, in words, why the errors do not tell it: they must be those of logits under a cross entropy,

    .. math:: e = s (p - y)

    with the same scale s in all batches (their sum or mean, or a part of it). An example that was never visited has 0.
    """
    if layer.keep != "slots" or layer.indexed or layer.d_out != classes:
        return f"the memory has no errors of the {classes} logits"
    rows, sums, batch = _errors_of_visits(store, view, layer, training, watch)
    size = sums.abs().sum(1)
    if not float(size.sum()) or float(sums.sum(1).abs().sum()) > UNEVEN * float(size.sum()):
        return f"the errors of layer '{layer.name}' are not those of a softmax"
    labels = training.labels[rows]
    foreign = float((size * (sums.argmin(1) != labels)).sum() / size.sum())  # the trained label has the negative error
    if foreign > FOREIGN:
        raise QueryError(
            f"{foreign:.0%} of the errors are those of other labels than y has. Pass the labels that the network was "
            "trained on, in the order of x; to judge other labels, compare them with the suggestions."
        )
    scaled = sums * batch.unsqueeze(1)
    misses = -scaled.gather(1, labels.unsqueeze(1))[:, 0]  # 1 − p of the label, times a number that all share
    if float(misses.max()) > 1.01:  # the loss is a sum over the batch
        scaled, misses = sums, -sums.gather(1, labels.unsqueeze(1))[:, 0]
    most = float(misses.max())
    scale = 1.0 if 0.5 < most <= 1.01 else most
    own = torch.nn.functional.one_hot(labels, classes)
    probabilities = (scaled / scale + own).clamp(0, 1)
    probabilities = probabilities / probabilities.sum(1, keepdim=True).clamp(min=1e-12)
    total = torch.zeros(len(training), classes, dtype=torch.float64).index_add_(0, rows, probabilities.double())
    count = torch.bincount(rows, minlength=len(training)).clamp(min=1)
    return total / count.unsqueeze(1)


def _errors_of_visits(
    store: Store, view: StoreView, layer: LayerInfo, training: TrainingSet, watch: OnProgress | None
) -> tuple[Int[Tensor, " V"], Float[Tensor, "V classes"], Float[Tensor, " V"]]:
    """The row, the summed errors and the size of the batch of each visit."""
    visits = len(training.row_of_visit) - 1
    total, batch = torch.zeros(visits, layer.d_out, dtype=store.compute), torch.zeros(visits, dtype=store.compute)
    for slots in stream(store, layer.name, view, errors=True, watch=watch):
        assert slots.errors is not None
        block = slots.block
        kept = np.flatnonzero(training.row_of_visit[block.visits] >= 0)
        place = torch.from_numpy(block.visits[kept])
        errors = slots.errors * slots.factors(layer.weights[0]).unsqueeze(1)
        total.index_add_(0, place, errors[torch.from_numpy(kept)])
        batch[place] = torch.from_numpy(block.calls.batch[block.call[kept]]).to(batch.dtype)
    seen = batch > 0
    return torch.from_numpy(training.row_of_visit[:-1])[seen], total[seen], batch[seen]
