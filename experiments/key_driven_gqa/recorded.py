"""One network with each attention, recorded while it trains."""

from typing import Any

import torch
from torch import nn

import dualform
from experiments.runs import Run

from .pictures import make_vit, task
from .settings import Recording
from .training import accuracy, batches


def train_recorded(run: Run, settings: Recording) -> dict[str, Any]:
    """Train as usual, recorded in float32; return the certificate and the residual of the parts by class."""
    start = settings.start
    given, model = task(start), make_vit(start, settings.attention, **settings.options)
    optimizer = torch.optim.RAdam(model.parameters(), lr=start.rate)
    model.train()
    with dualform.record(model, optimizer, run.memory, dtype="float32", overwrite=True, progress=False) as tape:
        for index in batches(start, model, len(given.y), start.updates, settings.seed):
            tape.note(index=index, label=given.y[index])
            nn.functional.cross_entropy(model(given.x[index]), given.y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(run.memory)
    groups = memory.attend(model, given.test_x[:4]).by(
        "label", layer=f"blocks.{start.layers - 1}.attn.value", progress=False
    )
    assert groups.residual is not None and groups.total is not None
    return {
        "accuracy": accuracy(model, given),
        "updates": start.updates,
        "certificate": dict(memory.certificate),
        "marks": len(memory.certificate.marks),
        "residual": float(groups.residual.abs().max() / groups.total.abs().max().clamp(min=1e-12)),
        "memory_megabytes": round(sum(f.stat().st_size for f in run.memory.rglob("*") if f.is_file()) / 1e6),
    }
