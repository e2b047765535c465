"""What it costs to keep only what training needs to run again (keep="replay"): the paper's MNIST run; time and disk.

python benchmarks/replay_log.py [--steps 3000] [--block 600] [--blocks 10] [--folder runs/replay-log]
"""

import argparse
import statistics
from pathlib import Path

import torch
from paper_run import BATCH, STEPS, images, machine, save, seconds, train
from torch.nn import functional as F

import dualform

WIDTHS = 784, 800, 800, 800, 800, 10
"""Of keys and errors of the three layers."""


def losses(model, batch):
    """Each image's share of the mean loss of its batch."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none") / len(labels)


def size(folder, *parts):
    """The bytes of some parts of a memory."""
    return sum(file.stat().st_size for part in parts for file in folder.glob(part))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--block", type=int, default=600)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("runs/replay-log"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    x, y = images("train")
    train(x, y, options.folder, steps=50, keep="replay")
    ratios = {"replay": [], "slots, replay": []}
    for block in range(options.blocks):
        kinds = [None, *ratios]
        taken = {}
        for kind in kinds if block % 2 else kinds[::-1]:
            keep = {} if kind is None else {"keep": kind.split(",")[0], "replay": True}
            path = None if kind is None else options.folder
            taken[kind], _ = seconds(lambda path=path, keep=keep: train(x, y, path, steps=options.block, **keep))
        for kind, values in ratios.items():
            values.append(taken[kind] / taken[None])
    plain, _ = seconds(lambda: train(x, y, steps=options.steps))
    model = train(x, y, options.folder, steps=options.steps, keep="replay")
    memory = dualform.open(options.folder)
    run = memory.replay(model, losses, lambda index: (x[index], y[index]))
    again, check = seconds(run.check)
    folder, visits = options.folder, options.steps * BATCH
    log = size(folder, "manifest.json", "run_log/*", "calls/*", "steps/*")
    lines = [
        f'| recorded / bare, keep="{kind.split(",")[0]}" with replay=True | {statistics.median(values):.3f} '
        f"({min(values):.3f} to {max(values):.3f}) |"
        for kind, values in ratios.items()
    ]
    states = memory.store.manifest.run_log.states
    rows = {
        "visits, bytes a visit": f"{size(folder, 'visits/*') / visits:.1f}",
        "log of steps and manifest, bytes a step": f"{log / options.steps:.1f}",
        "states of the generator": f"{size(folder, 'generators/*') / 1e3:.1f} kB",
        "first and last weights": f"{size(folder, 'init.safetensors', 'snapshots/*') / 1e6:.1f} MB",
        "whole states": f"{len(states)} of {states[0].file.bytes / 1e6:.1f} MB each",
        "all but whole states": f"{size(folder, '*', '*/*') / 1e6 - size(folder, 'states/*') / 1e6:.1f} MB",
        "slots of the same run would take in float16": f"{visits * 2 * sum(WIDTHS) / 1e9:.2f} GB",
        "run again / plain training": f"{again / plain:.2f}",
        "bit for bit": str(check.exact),
    }
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    head = f"""MLP 784-800-800-10 on MNIST, {options.steps:,} steps of {BATCH}, SGD with momentum and clipping.
Recording was timed in {options.blocks} blocks of {options.block} steps, in turns with bare training (CPU seconds of all
threads of the process; median and range). A block is a whole recording: its first and last weights and its whole states
are written, too.

| | |
|---|---|"""
    save("replay-log", "\n".join([head, *lines, "", f"Machine: {machine()}, 1 torch thread."]))


if __name__ == "__main__":
    main()
