"""Recorded visual query tuning: logits of the head as exact sums over the images of the transfer set."""

from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import dualform
from dualform.models import ViT
from dualform.tuning import VisualQueryTuning, trained_parameters
from experiments.runs import Run

from . import methods
from .pictures import labelled, pictures
from .settings import TransferSettings
from .training import accuracy, batches

ASKED, SHOWN = 4, 7
"""Number of explained test images, and of training images shown for each."""


def network(backbone: ViT, settings: TransferSettings) -> VisualQueryTuning:
    """The network that is recorded."""
    model = methods.way(backbone, settings).model
    assert isinstance(model, VisualQueryTuning)
    return model


def train_recorded(run: Run, backbone: ViT, settings: TransferSettings) -> dict[str, Any]:
    """Train with Adam at one rate, recorded in float32."""
    model, (part, index) = network(backbone, settings), labelled(settings.target, settings.labelled, settings.seed)
    optimizer = torch.optim.Adam(trained_parameters(model).values(), lr=settings.rates[0][0])
    with dualform.record(model, optimizer, run.memory, dtype="float32", overwrite=True, progress=False) as tape:
        for rows in batches(len(part.y), settings.batch, settings.epochs, settings.seed):
            tape.note(index=index[rows], label=part.y[rows])
            F.cross_entropy(model(part.x[rows]), part.y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    save_file(trained_parameters(model), run.folder / "tuned.safetensors")
    memory, test = dualform.open(run.memory), pictures(settings.target, "test")
    return {
        "accuracy": accuracy(model, test[: settings.tests] if settings.tests else test),
        "certificate": dict(memory.certificate),
        "floor": dict(memory.certificate.floor),
        "rest": [name for name in memory.certificate.rest if not name.startswith("backbone.")],
        "marks": len(memory.certificate.marks),
        "memory_megabytes": sum(f.stat().st_size for f in run.memory.rglob("*") if f.is_file()) / 1e6,
        "visits": len(part.y) * settings.epochs,
    }


def ask(run: Run, backbone: ViT, settings: TransferSettings) -> dict[str, Any]:
    """Explain the logits of some test images by training image and by class, with the residual of the sum."""
    model = network(backbone, settings)
    model.load_state_dict(load_file(run.folder / "tuned.safetensors"), strict=False)
    memory, test = dualform.open(run.memory), pictures(settings.target, "test")[:ASKED]
    spot = memory.attend(model.eval(), test.x)
    by = spot.by("label", layer="head", progress=False)
    assert by.total is not None and by.residual is not None
    said = model(test.x).argmax(1).tolist()
    by_example = spot.by("index", layer="head", progress=False).largest(SHOWN)
    classes = pictures(settings.target, "train").y
    found = {
        "labels": test.y.tolist(),
        "says": said,
        "off": float((spot.output("head") - model(test.x)).detach().abs().max()),
        "residual": float((by.residual / by.total.abs().clamp(min=1e-6)).abs().max()),
        "own_class": [dict(by.largest(10)[i])[said[i]] for i in range(ASKED)],
        "total": by.total.tolist(),
        "training": [
            [{"index": index, "label": int(classes[index]), "contribution": value} for index, value in line]
            for line in by_example
        ],
    }
    draw(run, settings, found, model)
    return found


@torch.no_grad()
def draw(run: Run, settings: TransferSettings, found: dict[str, Any], model: VisualQueryTuning) -> None:
    """Draw test images, the attention of the last query tokens, and the training images that contribute most."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    test, train = pictures(settings.target, "test"), pictures(settings.target, "train")
    drawn, axes = plt.subplots(ASKED, 2 + SHOWN, figsize=(1.15 * (2 + SHOWN), 1.35 * ASKED), layout="constrained")
    looks = query_attention(model, test.x[:ASKED])
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.set_frame_on(False)
    for i, line in enumerate(axes):
        line[0].imshow(shown(test.x[i]))
        line[0].set_title(f"{found['labels'][i]}, says {found['says'][i]}", fontsize=8)
        line[1].imshow(shown(test.x[i]), alpha=0.35)
        line[1].imshow(looks[i].numpy(), cmap="viridis", alpha=0.7, extent=(-0.5, 31.5, 31.5, -0.5))
        line[1].set_title("queries look", fontsize=8)
        for axis, hit in zip(line[2:], found["training"][i], strict=False):
            axis.imshow(shown(train.x[hit["index"]]))
            axis.set_title(f"{hit['contribution']:+.2g}, a {hit['label']}", fontsize=8)
    drawn.savefig(run.figures / "asked.png", dpi=110)
    plt.close(drawn)


def shown(x: torch.Tensor) -> Any:
    """The image as an array for ``imshow``."""
    return ((x + 1) / 2).clamp(0, 1).movedim(0, -1).numpy()


def query_attention(model: VisualQueryTuning, x: torch.Tensor) -> torch.Tensor:
    """Attention of the last layer's query tokens as a grid of patches, averaged over tokens and heads."""
    block: Any = model.backbone.blocks[-1]
    before = model.states(x)[:, -2]
    p = model.queries[-1].expand(len(x), -1, -1)
    weights = block.attn.weights(block.norm1(p), block.norm1(before)).mean((1, 2))[:, 1:]
    side = int(weights.shape[1] ** 0.5)
    return weights.unflatten(1, (side, side))
