"""Beyond the paper: mask a task or a class, keep only some of the visits, and explain forgetting.

All effects are direct: a mask removes what some visits put into the weights and holds everything else fixed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import dualform
from dualform.models import MLP
from experiments.runs import Run

from .settings import ImageSettings
from .training import make_model, pictures, right, trained

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
"""Shares of the visits that are kept."""

LAYERS = ("fc1", "fc2", "fc3")


def mask_phases(run: Run, settings: ImageSettings) -> dict[str, Any]:
    """Accuracies after two consecutive tasks with the first or the second masked, in all layers or in some."""
    memory, model = dualform.open(run.memory), make_model(settings)
    switch = settings.phases[0].updates
    then = memory.at(switch)
    first = pictures(settings.sets[0])
    at_switch, checkpoint = loaded(model, then.weights(progress=False)), trained(run, settings, phase=1)
    with torch.no_grad():
        changed = int((at_switch(first.test_x).argmax(1) != checkpoint(first.test_x).argmax(1)).sum())
        off = float((at_switch(first.test_x) - checkpoint(first.test_x)).abs().max())
    ledger = memory.ledger("phase", progress=False)
    result: dict[str, Any] = {
        "switch": {"predictions changed": changed, "images": len(first.test_y), "largest logit difference": off},
        "accuracy": {
            "as trained": accuracies(trained(run, settings), settings),
            "first phase, coefficients of the switch": accuracies(at_switch, settings),
        },
    }
    for name, masked, layers in (
        ("second phase masked", 2, LAYERS),
        ("second phase masked in layers 0 and 1", 2, LAYERS[:2]),
        ("second phase masked in layer 2", 2, LAYERS[2:]),
        ("first phase masked", 1, LAYERS),
        ("first phase masked in layers 0 and 1", 1, LAYERS[:2]),
        ("first phase masked in layer 2", 1, LAYERS[2:]),
    ):
        weights = {
            key: part
            + sum(ledger[phase][key] for phase in ledger if phase != masked or key.split(".")[0] not in layers)
            for key, part in ledger.initial.items()
        }
        result["accuracy"][name] = accuracies(loaded(model, weights), settings)
    return result


def mask_classes(run: Run, settings: ImageSettings) -> dict[str, Any]:
    """For each masked class: how often it is still predicted, and the accuracy on this class and on the others."""
    memory, model, images = dualform.open(run.memory), make_model(settings), pictures(settings.sets[0], settings.small)
    ledger = memory.ledger("label", progress=False)
    lines = []
    for label in range(10):
        weights = {
            key: part + sum(ledger[g][key] for g in ledger if g != label) for key, part in ledger.initial.items()
        }
        with torch.no_grad():
            said = loaded(model, weights)(images.test_x).argmax(1)
        mine = images.test_y == label
        lines.append({
            "class": label,
            "answers of this class": float((said == label).double().mean()),
            "right in this class": float((said == images.test_y)[mine].double().mean()),
            "right in the others": float((said == images.test_y)[~mine].double().mean()),
        })  # fmt: skip
    return {"classes": lines}


def keep_some(run: Run, settings: ImageSettings) -> dict[str, Any]:
    """Accuracy against the share of visits kept: the largest, the latest, the earliest or random ones."""
    memory, model, name = dualform.open(run.memory), make_model(settings), settings.sets[0]
    whole = memory.weights(progress=False)
    first = memory.at(0).weights(progress=False)
    sizes = sum(
        memory.sizes(layer, progress=False) / (whole[f"{layer}.weight"] - first[f"{layer}.weight"]).norm()
        for layer in LAYERS
    )
    assert isinstance(sizes, Tensor)
    random = torch.rand(len(sizes), generator=torch.Generator().manual_seed(settings.seed))
    orders = {
        "largest": sizes.argsort(descending=True),
        "latest": torch.arange(len(sizes)).flip(0),
        "earliest": torch.arange(len(sizes)),
        "random": random.argsort(),
    }
    accuracy = {order: kept_accuracies(memory, model, places, name, settings) for order, places in orders.items()}
    total = sizes.sort(descending=True).values.cumsum(0) / sizes.sum()
    carried = {str(share): float(total[max(0, int(share * len(total)) - 1)]) for share in SHARES}
    return {"shares": list(SHARES), "accuracy": accuracy, "share of all sizes in the largest": carried}


def kept_accuracies(
    memory: dualform.Memory, model: MLP, order: Tensor, name: str, settings: ImageSettings
) -> list[float]:
    """Accuracies with the first visits of an order only, for growing shares; each share adds to the one before."""
    ends = torch.tensor([round(share * len(order)) for share in SHARES])
    piece = torch.empty(len(order), dtype=torch.int64)
    piece[order] = torch.searchsorted(ends, torch.arange(len(order)), right=True)
    ledger = memory.ledger(piece.tolist(), progress=False)
    kept, weights = [], dict(ledger.initial)
    for group in sorted(ledger):
        weights = {key: part + ledger[group][key] for key, part in weights.items()}
        kept.append(right(loaded(model, weights), name, settings))
    return kept


def explain_forgetting(run: Run, settings: ImageSettings) -> dict[str, Any]:
    """Split the margin of images of the first task that were right at the switch and are wrong at the end.

    The target is the logit of the true class minus that of the predicted one; each layer's part is split by phase
    and class. The split is exact for the last layer, and first order through the layers above for the others.
    """
    memory, model = dualform.open(run.memory), trained(run, settings)
    images, before = pictures(settings.sets[0]), trained(run, settings, phase=1)
    with torch.no_grad():
        said, then = model(images.test_x).argmax(1), before(images.test_x).argmax(1)
    lost = (said != images.test_y) & (then == images.test_y)
    x, true, now = images.test_x[lost], images.test_y[lost], said[lost]
    rows = torch.arange(len(true))

    def margin(logits: Tensor) -> Tensor:
        return logits[rows, true] - logits[rows, now]

    result: dict[str, Any] = {"lost": int(lost.sum()), "images": len(lost), "layers": {}}
    for layer in LAYERS if len(true) else ():
        spot = memory.attend(model, x, target=margin)
        phases = spot.by("phase", layer=layer, progress=False)
        groups = spot.by("group", layer=layer, progress=False)
        assert phases.bias is not None and groups.bias is not None
        assert phases.initial is not None and phases.total is not None
        means = (groups.values + groups.bias).mean(0).tolist()
        same = [
            (groups.values + groups.bias)[i, groups.names.index(f"{settings.sets[1]} {int(label)}")].item()
            for i, label in enumerate(now)
        ]
        result["layers"][layer] = {
            "initial": float(phases.initial.mean()),
            "phases": dict(zip(map(str, phases.names), (phases.values + phases.bias).mean(0).tolist(), strict=True)),
            "whole": float(phases.total.mean()),
            "groups": dict(zip(groups.names, means, strict=True)),
            "second task, class of the wrong answer": sum(same) / len(same),
        }
    return result


def loaded(model: MLP, weights: Mapping[str, Tensor]) -> MLP:
    """The model, with its weights replaced."""
    model.load_state_dict({key: tensor.float() for key, tensor in weights.items()})
    return model


def accuracies(model: MLP, settings: ImageSettings, sets: Sequence[str] = ()) -> dict[str, float]:
    """Test accuracy on each data set."""
    return {name: right(model, name, settings) for name in sets or settings.sets}
