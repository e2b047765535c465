"""A ledger of a long run: what it takes on disk as training goes on, and whether it says what a whole tape says.

python benchmarks/ledger.py [--steps 12000] [--folder runs/ledger]
"""

import argparse
import shutil
import time
from pathlib import Path

import torch
from paper_run import machine, save
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.data import digits
from dualform.models import MLP


def train(path, steps, looks, **options):
    """A small network on handwritten digits, from three sources; the size of its memory at some steps, and seconds."""
    images, labels = digits()
    x = F.avg_pool2d(images.double() / 255, 4).flatten(1)
    torch.manual_seed(0)
    model = MLP(49, 32, 10).double()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    sizes, begin = {}, time.perf_counter()
    shutil.rmtree(path, ignore_errors=True)
    with dualform.record(model, optimizer, path, dtype="float64", progress=False, **options) as tape:
        for step in range(1, steps + 1):
            index = torch.randint(len(x), (16,))
            tape.note(source=[("north", "south", "sea")[i % 3] for i in index.tolist()])
            F.cross_entropy(model(x[index]), labels[index]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step in looks:
                tape.flush()
                sizes[step] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return model, sizes, time.perf_counter() - begin


def main():
    """Both ways, side by side."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=12_000)
    options.add_argument("--folder", type=Path, default=Path("runs/ledger"))
    asked = options.parse_args()
    torch.set_num_threads(1)
    looks = [asked.steps * i // 4 for i in (1, 2, 3, 4)]
    model, grown, slow = train(asked.folder / "tape", asked.steps, looks)
    _, kept, fast = train(asked.folder / "ledger", asked.steps, looks, keep="ledger", by="source")
    tape, alone = dualform.open(asked.folder / "tape"), dualform.open(asked.folder / "ledger")
    begin = time.perf_counter()
    expected = tape.ledger("source", progress=False)
    summed = time.perf_counter() - begin
    found = alone.ledger("source", progress=False)
    off = max(
        float((found[group][name] - tensor).norm() / tensor.norm())
        for group in expected
        for name, tensor in expected[group].items()
    )
    lines = [
        f"MLP 49-32-10 in float64, AdamW, clipping, {asked.steps:,} steps of 16 digits, three sources, one thread.",
        "",
        "| after step | tape, MB | ledger, MB |",
        "|---|---|---|",
        *(f"| {step:,} | {grown[step] / 1e6:.2f} | {kept[step] / 1e6:.3f} |" for step in looks),
        "",
        f"Training took {slow:.0f} s with the tape, {fast:.0f} s with the ledger. The parts of the weights by source",
        f"that are summed from the tape (in {summed:.0f} s) and those of the ledger differ by {off:.0e} of their size.",
        f"Certificates: {max(tape.check(model, full=True, progress=False).values()):.0e} from the tape,",
        f"{max(alone.certificate.values()):.0e} from the ledger.",
        "",
        f"Machine: {machine()}.",
    ]
    save("ledger", "\n".join(lines))
    shutil.rmtree(asked.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
