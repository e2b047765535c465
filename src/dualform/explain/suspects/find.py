"""Suspects from three voices: what layers saw of other examples, what they made of it, and what training said."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.engine import StoreView
from dualform.errors import QueryError
from dualform.progress import OnProgress, Progress, bar
from dualform.store import Store
from dualform.types import LayerInfo

from .answers import Suspects
from .example_keys import example_keys
from .leave_one_out_labels import leave_one_out_labels
from .near_duplicates import nearest_examples
from .self_influence import Weights, asked_about_themselves, layers_with_slots
from .training_labels import training_labels
from .training_set import TrainingSet

LEAST = 1e-6
"""The least probability whose logarithm counts."""


def find_suspects(
    store: Store, view: StoreView, training: TrainingSet, model: nn.Module, weights: Weights,
    classes: Sequence[str], progress: Progress,
) -> Suspects:  # fmt: skip
    """Score every example by how unlikely its label is to those who do not just repeat it.

    1. The inputs (twice): what the first layer saw, or an embedding, asked for the label without the example itself.
       What it saw does not depend on labels, so this voice has not learned the wrong ones.
    2. The other layers: the mean of the same over what they saw, averaged over training.
    3. Training: what the network said of the example at its visits, on average.

    The last two know the labels. One that guesses them worse than the inputs all the same has nothing to add, and is
    not heard.
    """
    layers = [layer for layer in store.manifest.layers if layer.keep in ("slots", "keys", "keys+ledger")]
    layers = [layer for layer in layers if store.slots(layer.name)]
    if not layers:
        raise QueryError(
            f"the memory at {store.path} keeps no keys of any layer, so suspects cannot be found. Record at least the "
            "first and the last layer with keep='slots' or 'keys'."
        )
    uses, _ = layers_with_slots(store)
    left_out: dict[str, str] = {}
    steps = sum(store.slots(layer.name) for layer in layers)
    with bar("suspects", steps, progress) as watch:
        own = None
        try:
            logits, own = asked_about_themselves(store, view, training, model, weights, uses[-1:], "margin")
        except QueryError as error:
            if not uses:
                raise
            left_out["column 'own'"] = str(error).rstrip(".")
            logits, _ = asked_about_themselves(store, view, training, model, weights, [], "margin")
        if not uses:
            own, left_out["column 'own'"] = None, "no layer has slots and a rule"
        probabilities, voices, features = _voices(store, view, layers, training, logits.shape[1], left_out, watch)
    suspects = _table(training, logits, probabilities, own, features, voices, left_out, classes)
    return replace(suspects, folder=str(store.path))


def _voices(
    store: Store, view: StoreView, layers: Sequence[LayerInfo], training: TrainingSet, classes: int,
    left_out: dict[str, str], watch: OnProgress | None,
) -> tuple[Float[Tensor, "n classes"], tuple[str, ...], Float[Tensor, "n d"]]:  # fmt: skip
    """The probability of each class for each example that training saw, what it is made of, and what the inputs are."""
    used = training.visits > 0
    labels = training.labels[used]
    inputs, input_name, input_loss, features = None, "", float("inf"), torch.zeros(len(training), 0)
    deeper: dict[str, Tensor] = {}
    for place, layer in enumerate(layers):
        keys = example_keys(store, view, layer, training, watch)
        guess = leave_one_out_labels(keys[used], labels, classes)
        if place == 0 or layer.indexed:
            loss = _loss(guess, labels)
            if loss < input_loss:
                inputs, input_name, input_loss, features = guess, layer.name, loss, keys
        else:
            deeper[layer.name] = guess
    assert inputs is not None
    deeper = {name: guess for name, guess in deeper.items() if _loss(guess, labels) < input_loss}
    total, weight, voices = 2 * inputs.double(), 2, [f"what {input_name} saw (twice)"]
    if deeper:
        total, weight = total + torch.stack([guess.double() for guess in deeper.values()]).mean(0), weight + 1
        voices.append(f"the mean of {', '.join(deeper)}")
    said = training_labels(store, view, layers[-1], training, classes, None)
    if isinstance(said, str):
        left_out["voice of the training"] = said
    elif _loss(said[used], labels) < input_loss:
        total, weight = total + said[used], weight + 1
        voices.append("what the network said while it was trained")
    probabilities = torch.zeros(len(training), classes, dtype=torch.float64)
    probabilities[used] = total / weight
    return probabilities, tuple(voices), features


def _table(
    training: TrainingSet, logits: Tensor, probabilities: Tensor, own: Tensor | None, features: Tensor,
    voices: tuple[str, ...], left_out: dict[str, str], classes: Sequence[str],
) -> Suspects:  # fmt: skip
    labels, used = training.labels.unsqueeze(1), training.visits > 0
    network = logits.double().softmax(1)
    probabilities = torch.where(used.unsqueeze(1), probabilities, network)  # to a new example the network is fair
    given = probabilities.gather(1, labels)[:, 0]
    best = probabilities.scatter(1, labels, -1.0).max(1)
    confidence = network.gather(1, labels)[:, 0]
    columns = {
        "index": training.index,
        "label": training.labels.numpy(),
        "suggested": best.indices.numpy(),
        "score": (1 - given).numpy(),
        "suspect": (best.values > given).numpy(),
        "loss": nn.functional.cross_entropy(logits.double(), training.labels, reduction="none").numpy(),
        "confidence": confidence.numpy(),
        "visits": training.visits.numpy(),
    }
    if own is not None:
        columns["own"] = own.numpy()
    nearest = nearest_examples(features[used])
    if nearest is None:
        left_out["columns 'nearest' and 'distance'"] = "there are too many examples to compare all pairs quickly"
    else:
        seen, (rows, distances) = used.nonzero()[:, 0], nearest
        place, distance = torch.full((len(training),), -1), torch.full((len(training),), torch.inf, dtype=torch.float64)
        place[seen], distance[seen] = torch.from_numpy(training.index)[seen[rows]], distances.double()
        columns |= {"nearest": place.numpy(), "distance": distance.numpy()}
    order = np.argsort(-columns["score"], kind="stable")
    table = pa.table({name: values[order] for name, values in columns.items()})
    return Suspects(table, order, voices, left_out, tuple(classes))


def _loss(probabilities: Float[Tensor, "n classes"], labels: Tensor) -> float:
    return float(-probabilities.gather(1, labels.unsqueeze(1)).clamp(min=LEAST).log().mean())
