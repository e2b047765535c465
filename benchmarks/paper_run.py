"""The run that the benchmarks share: MNIST, MLP 784-800-800-10, the paper's settings."""

from contextlib import nullcontext

import torch
from torch import nn

import dualform
from dualform.data import mnist
from dualform.models import MLP

STEPS, BATCH = 3000, 128


def images(part):
    pixels, labels = mnist(part)
    return (pixels.float() - 33.275) / 78.518, labels


def train(x, y, path=None, steps=STEPS, seed=0, dtype="float16", **options):
    """Train, recorded if there is a path; lr 3e-3, momentum 0.9, clipping at 1.0."""
    torch.manual_seed(seed)
    model = MLP(784, 800, 800, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
    tape = (
        dualform.record(model, optimizer, path, dtype=dtype, overwrite=True, progress=False, **options)
        if path
        else nullcontext()
    )
    done = 0
    with tape:
        while done < steps:
            order = torch.randperm(len(x))
            for index in order[: len(x) // BATCH * BATCH].split(BATCH)[: steps - done]:
                if path:
                    tape.note(index=index, label=y[index])
                nn.functional.cross_entropy(model(x[index]), y[index]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                done += 1
    return model
