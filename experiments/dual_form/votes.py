"""Table 1: how often the class with the largest total score is the true class or the predicted one.

A vote is the class whose training visits have the largest total. "Target" is how often it is the true class, "output"
how often it is the network's prediction; images that the network gets right and wrong are counted separately.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

import dualform
from experiments.runs import Run

from .settings import ImageSettings
from .training import all_training, batches, make_model, pictures, trained

LAYERS = {"fc1": 0, "fc2": 1, "fc3": 2}
"""The paper numbers a layer by its input: layer 0 sees the pixels."""


def count_votes(run: Run, settings: ImageSettings) -> dict[str, Any]:
    """Votes of all scores on a single task, over all slots and all test images."""
    model, images = trained(run, settings), pictures(settings.sets[0], settings.small)
    x, y = images.test_x[: settings.test_images], images.test_y[: settings.test_images]
    memory = dualform.open(run.memory)
    spot = memory.attend(model, x)
    said = spot.prediction.argmax(1)
    counts = torch.bincount(torch.tensor(memory.visits["label"].to_pylist()), minlength=10).double()
    result: dict[str, Any] = {"test_images": len(y), "right": float((said == y).double().mean()), "layers": {}}
    untrained = class_sums(settings)
    for layer, number in LAYERS.items():
        total = spot.by("label", layer=layer, score="abs", progress=False).values
        signed = spot.by("label", layer=layer, score="weight", progress=False).values
        to_said = spot.by("label", layer=layer, progress=False)
        totals = {
            "abs": total,
            "abs, a visit": total / counts,
            "weight": signed,
            "contribution to the answer": to_said.values + to_said.bias,
            "contribution to the answer, a visit": (to_said.values + to_said.bias) / counts,
            "untrained network": untrained[number](x),
        }
        if layer == max(LAYERS):  # the only layer where a contribution to a logit is exact
            totals["contribution of each class to its own logit"] = own_pulls(memory, model, x, layer)
        result["layers"][str(number)] = {name: shares(values.argmax(1), said, y) for name, values in totals.items()}
        assert to_said.residual is not None and to_said.total is not None
        result["layers"][str(number)]["residual"] = float(to_said.residual.abs().max())
        result["layers"][str(number)]["slots"] = memory.store.slots(layer)
    return result


def shares(votes: Int[Tensor, " n"], said: Int[Tensor, " n"], true: Int[Tensor, " n"]) -> dict[str, float]:
    """Agreement of votes with the truth and with the network, in per cent."""
    wrong = said != true

    def share(agrees: Bool[Tensor, " n"], among: Bool[Tensor, " n"]) -> float:
        return 100.0 * float(agrees[among].double().mean()) if bool(among.any()) else float("nan")

    return {
        "target, wrong": share(votes == true, wrong),
        "output, wrong": share(votes == said, wrong),
        "right": share(votes == true, ~wrong),
    }


def own_pulls(memory: dualform.Memory, model: nn.Module, x: Tensor, layer: str) -> Float[Tensor, "n 10"]:
    """Contribution of the visits of each class to the logit of that class."""
    pulls = []
    for label in range(10):
        parts = memory.attend(model, x, target=label).by("label", layer=layer, progress=False)
        assert parts.bias is not None
        pulls.append((parts.values + parts.bias)[:, parts.names.index(label)])
    return torch.stack(pulls, 1)


def class_sums(settings: ImageSettings) -> Mapping[int, Any]:
    """Votes of an untrained network: queries times the sum of each layer's inputs over the visits of a class.

    After a ReLU this sum determines the total attention, for a trained network too. For the pixels it gives Σα.
    """
    model = make_model(settings)
    rows, labels, _, _ = all_training(settings)
    seen = torch.cat([index for _, index in batches(settings)])
    times = torch.bincount(seen, minlength=len(labels)).float()

    def features(x: Tensor, depth: int) -> Tensor:
        with torch.no_grad():
            for layer in model.layers[:depth]:
                x = layer(x).relu()
        return x

    def vote(depth: int) -> Any:
        sums = torch.zeros(10, model.layers[depth].in_features)
        for some, y, n in zip(rows.split(4096), labels.split(4096), times.split(4096), strict=True):
            sums.index_add_(0, y, features(some, depth) * n.unsqueeze(1))
        return lambda x: features(x, depth) @ sums.mT

    return {depth: vote(depth) for depth in range(len(model.layers))}
