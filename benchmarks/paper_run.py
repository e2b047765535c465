"""The run that the benchmarks share: MNIST, MLP 784-800-800-10, the settings of Irie, Csordás, Schmidhuber (2022)."""

import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import dualform
from dualform.data import mnist
from dualform.models import MLP
from dualform.show.machine import machine

__all__ = ["BATCH", "STEPS", "images", "machine", "save", "seconds", "train"]
STEPS, BATCH = 3000, 128
RESULTS = Path(__file__).parent.parent / "docs" / "results"


def images(part):
    """Images scaled as in the paper's code, and their classes."""
    pixels, labels = mnist(part)
    return (pixels.float() - 33.275) / 78.518, labels


def train(x, y, path=None, steps=STEPS, seed=0, dtype="float16", **options):
    """Train, recorded if there is a path: lr 3e-3, momentum 0.9, gradient norm clipped at 1.0."""
    torch.manual_seed(seed)
    model = MLP(784, 800, 800, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
    options = {"dtype": dtype, "overwrite": True, "progress": False, **options}
    tape = dualform.record(model, optimizer, path, **options) if path else None
    done = 0
    with tape or nullcontext():
        while done < steps:
            order = torch.randperm(len(x))
            for index in order[: len(x) // BATCH * BATCH].split(BATCH)[: steps - done]:
                if tape:
                    tape.note(index=index, label=y[index])
                nn.functional.cross_entropy(model(x[index]), y[index]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                done += 1
    return model


def seconds(work):
    """CPU seconds of all threads of this process, and the result."""
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def save(name, text):
    """Print a result and keep it with the documentation."""
    print(text)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text + "\n")
