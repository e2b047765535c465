"""How cheap can the checks of every step be? The time of one reading of all weights, inside the paper's MNIST run.

python benchmarks/check_floor.py [--steps 300] [--repeats 5] [--threads 1 2]

A recorder that notices every changed bit reads the weights after each step and before the next, and the gradients once.
This script trains *unrecorded* and makes these readings itself, with nothing else: what it measures is the least that
such checks cost on a machine, whoever writes them.
"""

import argparse
import statistics
import time

import torch
import xxhash
from paper_run import BATCH, images, machine, save
from torch import nn

from dualform.models import MLP


def timed_steps(x, y, steps):
    """Seconds of a step without the readings, and of each reading: weights after, weights before, gradients."""
    model = MLP(784, 800, 800, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9)
    directions = [torch.randn(weight.shape[-1]) for weight in model.parameters()]
    training, readings = [], {"weights after the step": [], "weights before the step": [], "gradients": []}

    def read(kind, function):
        begin = time.perf_counter()
        function()
        readings[kind].append(time.perf_counter() - begin)
        return readings[kind][-1]

    def checksums():
        for weight in model.parameters():
            xxhash.xxh3_64_intdigest(weight.detach().numpy())

    def products():
        for weight, direction in zip(model.parameters(), directions, strict=True):
            torch.matmul(weight.grad, direction)

    for index in torch.randint(len(x), (steps, BATCH)):
        begin = time.perf_counter()
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        apart = read("weights before the step", checksums) + read("gradients", products)
        optimizer.step()
        apart += read("weights after the step", checksums)
        optimizer.zero_grad()
        training.append(time.perf_counter() - begin - apart)
    return statistics.median(training), {kind: statistics.median(seconds) for kind, seconds in readings.items()}


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    chosen = options.parse_args()
    x, y = images("train")
    lines = []
    for threads in chosen.threads:
        torch.set_num_threads(threads)
        runs = [timed_steps(x, y, chosen.steps) for _ in range(chosen.repeats)]
        step = statistics.median(seconds for seconds, _ in runs)
        parts = {kind: statistics.median(readings[kind] for _, readings in runs) for kind in runs[0][1]}
        cells = " | ".join(f"{1e3 * parts[kind]:.2f}" for kind in parts)
        lines.append(f"| {threads} | {1e3 * step:.1f} | {cells} | {100 * sum(parts.values()) / step:.1f} % |")
    size = sum(weight.nbytes for weight in MLP(784, 800, 800, 10).parameters()) / 1e6
    table = "\n".join(lines)
    save(
        "check-floor",
        f"""MLP 784-800-800-10 ({size:.1f} MB of weights) on MNIST, batches of {BATCH}, unrecorded. Each column is one
reading of all weights (a 64-bit checksum) or of all gradients (a product with a vector), in
milliseconds, median over steps.

| torch threads | one step, ms | weights after, ms | weights before, ms | gradients, ms | together, of a step |
|---|---|---|---|---|---|
{table}

Machine: {machine()}.""",
    )


if __name__ == "__main__":
    main()
