"""How exact the dual form is at full size: the paper's MNIST run, certificate and predictions from the slots alone.

python benchmarks/exactness.py [--dtypes float32 float16] [--attend 10000] [--folder runs]
"""

import argparse
from pathlib import Path

import torch
from paper_run import STEPS, images, machine, save, train

import dualform
from dualform.engine import StoreView, coefficients, dual_output, initial_part


def attended(memory, x):
    """The logits when every layer is its first weights plus attention over all of its slots."""
    for i, layer in enumerate(memory.layers):
        info, module = memory.store.layer(layer)
        of_step = [coefficients(memory.store, info.weights[0], memory.step).of_step]
        out = dual_output(memory.store, layer, StoreView(memory.step), x, of_step)
        out += x.double() @ initial_part(memory.store, info.weights[0], memory.step).mT
        out += memory.parameter(module.biases[0])
        x = (out.relu() if i < len(memory.layers) - 1 else out).float()
    return x


def differ(found, logits):
    """How far logits are apart, and how many predictions that changes."""
    changed = int((found.argmax(1) != logits.argmax(1)).sum())
    return f"{(found - logits).abs().max():.1e}, {changed} of {len(logits):,} predictions changed"


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--dtypes", nargs="+", default=["float32", "float16"])
    options.add_argument("--attend", type=int, default=10_000, help="test images to answer by attention over all slots")
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--folder", type=Path, default=Path("runs"))
    asked = options.parse_args()
    torch.set_num_threads(2)
    x, y = images("train")
    test, labels = images("test")
    parts = []
    for dtype in asked.dtypes:
        path = asked.folder / f"mnist-{dtype}"
        model = train(x, y, path, asked.steps, dtype=dtype)
        memory = dualform.open(path)
        with torch.no_grad():
            logits = model(test)
        accuracy = (logits.argmax(1) == labels).float().mean().item()
        full, closing = memory.check(model, full=True), memory.certificate
        rebuilt = memory.predict(model, test)
        few = asked.attend if dtype == "float32" else min(asked.attend, 500)
        dual = attended(memory, test[:few].flatten(1))
        table = "\n".join(
            f"| {name} | {closing[name]:.1e} | {full[name]:.1e} | {full.floor[name]:.1e} |" for name in full
        )
        parts.append(
            f"""### {dtype} memory

| parameter | certificate (some entries, when recording closed) | every entry | rounding floor of training |
|---|---|---|---|
{table}

Test accuracy {accuracy:.2%}. Weights rebuilt from the slots: largest difference of a logit
{differ(rebuilt, logits)}.
All layers answered by attention over their {memory.store.slots("fc1"):,} slots, {few:,} images: largest difference
{differ(dual, logits[:few])}."""
        )
        print(parts[-1], flush=True)
    head = f"MLP 784-800-800-10 on MNIST, {asked.steps:,} steps of 128, lr 3e-3, momentum 0.9, clip 1.0."
    save("exactness", "\n\n".join([head, *parts, f"Machine: {machine()}."]))


if __name__ == "__main__":
    main()
