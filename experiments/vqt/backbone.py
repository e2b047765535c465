"""The backbone: a small vision transformer, trained from scratch."""

from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from dualform.errors import DataNotFound
from dualform.models import ViT
from experiments.runs import Run, console

from .pictures import pictures
from .settings import SOURCE, BackboneSettings
from .training import accuracy, batches

FILE = "model.safetensors"


def make(settings: BackboneSettings) -> ViT:
    """An untrained backbone, determined by the seed of the settings."""
    torch.manual_seed(settings.seed)
    shape = {"width": settings.width, "heads": settings.heads, "layers": settings.layers}
    return ViT(settings.size, settings.patch, classes=10, **shape)


def train_backbone(run: Run, settings: BackboneSettings) -> dict[str, Any]:
    """Train with AdamW, a warm-up and half a cosine over all updates; horizontal flips are the only augmentation."""
    train, test = pictures(settings.source, "train"), pictures(settings.source, "test")
    train = train[: settings.most] if settings.most else train
    test = test[: settings.most] if settings.most else test
    model = make(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.decay)
    every = list(batches(len(train.y), settings.batch, settings.epochs, settings.seed))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, len(every), pct_start=0.1)
    random, losses = torch.Generator().manual_seed(settings.seed), []
    for index in track(every, "training the backbone", console=console, transient=True):
        x, y = train[index]
        flip = torch.rand(len(y), 1, 1, 1, generator=random) < 0.5
        loss = F.cross_entropy(model(torch.where(flip, x.flip(-1), x)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    save_file(model.state_dict(), run.folder / FILE)
    return {
        "accuracy": accuracy(model, test),
        "train_accuracy": accuracy(model, train[: len(test.y)]),
        "updates": len(every),
        "loss": sum(losses[-50:]) / len(losses[-50:]),
        "parameters": sum(each.numel() for each in model.parameters()),
    }


def load(runs: Path, settings: BackboneSettings) -> ViT:
    """Load the trained backbone from a folder of runs."""
    file = runs / "vqt" / "backbone" / SOURCE / f"seed-{settings.seed}" / FILE
    if not file.exists():
        raise DataNotFound(f"there is no backbone yet ({file}): run 'dualform reproduce vqt/backbone' first.")
    model = make(settings)
    model.load_state_dict(load_file(file))
    return model.eval()
