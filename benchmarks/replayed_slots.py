"""What questions cost on a run that kept no slots: MNIST, MLP 784-800-800-10, each as a multiple of plain training.

Each line is kept when it is measured: started again, the script goes on where it stopped.

python benchmarks/replayed_slots.py [--steps 3000] [--folder runs]
"""

import argparse
import json
from pathlib import Path

import torch
from paper_run import images, machine, save, seconds, train
from torch.nn import functional as F

import dualform
from dualform.models import MLP

CASES = (("float16", "4 GB"), ("float32", "8 GB"), ("float32", "4 GB"), ("float32", "500 MB"))


def losses(model, batch):
    """Each image's share of the mean loss of its batch."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none") / len(labels)


def bytes_on_disk(folder):
    """Bytes of slots that lie in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("shards/*.safetensors"))


def measure(run, memory, test, plain, dtype, budget, folder):
    """The line of a table: what questions cost in one precision under one budget."""
    made, slots = seconds(lambda: run.slots(budget, dtype=dtype, folder=folder, progress=False))
    spot = run.attend(test)
    top, hits = seconds(lambda: spot.top(10, layer="fc1", progress=False, per="slot"))
    by, _ = seconds(lambda: spot.by("label", layer="fc2", progress=False))
    half, _ = seconds(lambda: slots.at(slots.step // 2).weights(progress=False))
    kept = memory.attend(run._slots[-1].trained, test).top(10, layer="fc1", progress=False, per="slot")
    files, check = run._slots[-1].files, slots.certificate
    assert all(error <= 2 * check.floor[name] + 1e-3 for name, error in check.items())
    cells = [dtype, budget, f"{files.total / 1e9:.2f} GB", f"{bytes_on_disk(files.folder) / 1e9:.2f} GB"]
    cells += [f"{(made + top) / plain:.2f}", *(f"{took / plain:.2f}" for took in (top, by, half))]
    return f"| {' | '.join([*cells, f'{(hits.visits == kept.visits).float().mean():.1%}'])} |"


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=3000)
    options.add_argument("--queries", type=int, default=64)
    options.add_argument("--folder", type=Path, default=Path("runs"))
    asked = options.parse_args()
    torch.set_num_threads(1)
    x, y = images("train")
    test = images("test")[0][: asked.queries]
    path, notes = asked.folder / f"mnist-replayed-{asked.steps}", asked.folder / f"replayed-slots-{asked.steps}.json"
    measured = json.loads(notes.read_text()) if notes.exists() else {}
    if "plain" not in measured:
        train(x, y, steps=50)
        measured["plain"], _ = seconds(lambda: train(x, y, steps=asked.steps))
        train(x, y, path, steps=asked.steps, dtype="float16")
        notes.write_text(json.dumps(measured))
    plain, memory = measured["plain"], dualform.open(path)
    for dtype, budget in CASES:
        if f"{dtype} {budget}" not in measured:
            with memory.replay(MLP(784, 800, 800, 10), losses, lambda index: (x[index], y[index])) as run:
                line = measure(run, memory, test, plain, dtype, budget, asked.folder)
            measured[f"{dtype} {budget}"] = line
            notes.write_text(json.dumps(measured))
            print(line, flush=True)
    lines = [measured[f"{dtype} {budget}"] for dtype, budget in CASES]
    head = f"""{asked.steps} steps of 128 images, SGD with momentum and clipping. Plain training takes
{plain:.1f} CPU seconds, and every cost is a multiple of that (CPU seconds of all threads of the process). The first
question is `top(10)` of {asked.queries} test images in the first layer, together with all of training, run again once.
After that come the same question, `by("label")` in the second layer, and all weights at half of the training, each by
itself. The last column says how many of the ten best visits are those of slots that were kept in float16.

| slots in | budget | all slots | on disk | with the run: first top | top | by | weights at half | same top 10 as kept |
|---|---|---|---|---|---|---|---|---|"""
    save("replayed-slots", "\n".join([head, *lines, "", f"Machine: {machine()}, 1 torch thread."]))


if __name__ == "__main__":
    main()
