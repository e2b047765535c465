"""What recording costs for networks as people train them: tape and ledger beside the bare loop, in turns.

python benchmarks/overheads.py [--repeats 3] [--steps 40] [--threads 1] [--folder runs/overheads] [--only cnn]
"""

import argparse
import cProfile
import pstats
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from paper_run import machine, save
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform import data


class CharLSTM(nn.Module):
    def __init__(self, width=200):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(256, 64), nn.LSTM(64, width, batch_first=True)
        self.out = nn.Linear(width, 256)

    def forward(self, x):
        return self.out(self.lstm(self.embed(x))[0])


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        h = self.first(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.back(F.gelu(self.wide(self.second(x))))


class Transformer(nn.Module):
    def __init__(self, width=128, heads=4, layers=2, length=64):
        super().__init__()
        self.embed, self.places = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.out = nn.Linear(width, 256)
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1))

    def forward(self, x):
        h = self.embed(x) + self.places[: x.shape[1]]
        for block in self.blocks:
            h = block(h, self.mask[: x.shape[1], : x.shape[1]])
        return self.out(h)


def mlp():
    return nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 10))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip


def images(flat, batch):
    pictures, labels = data.mnist("train")
    x = pictures[: 64 * batch].float().div(255).unflatten(0, (-1, batch))
    return list(
        zip(x.flatten(2) if flat else x.unsqueeze(2), labels[: 64 * batch].unflatten(0, (-1, batch)), strict=True)
    )


def text(batch, length):
    ids = torch.frombuffer(bytearray(data.aesop().encode()), dtype=torch.uint8).long()
    rows = ids[: (length + 1) * batch * 16].unflatten(0, (-1, batch, length + 1))
    return [(row[..., :-1], row[..., 1:]) for row in rows]


@dataclass
class Subject:
    """What is trained, on which batches, and what it is."""

    make: object
    batches: object
    about: str


SUBJECTS = {
    "mlp": Subject(mlp, lambda: images(True, 128), "MLP 784-800-800-10, 128 images"),
    "cnn": Subject(cnn, lambda: images(False, 64), "CNN 16 and 32 channels of 3 × 3, 64 images"),
    "lstm": Subject(CharLSTM, lambda: text(32, 50), "LSTM of 200 units, bytes, 32 × 50 tokens"),
    "transformer": Subject(
        Transformer, lambda: text(16, 64), "transformer, 2 layers of width 128, bytes, 16 × 64 tokens"
    ),
}


def train(subject, batches, steps, path=None, **options):
    """Seconds of the loop, with the closing of the memory."""
    torch.manual_seed(0)
    model = subject.make()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    def step(i):
        x, y = batches[i % len(batches)]
        z = model(x)
        F.cross_entropy(z.flatten(0, -2), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    begin = time.perf_counter()
    if path is None:
        for i in range(steps):
            step(i)
    else:
        shutil.rmtree(path, ignore_errors=True)
        with dualform.record(model, optimizer, path, progress=False, **options) as tape:
            for i in range(steps):
                y = batches[i % len(batches)][1]
                tape.note(source=["a", "b", "c", "d"][: len(y)] * (len(y) // 4))
                step(i)
    return time.perf_counter() - begin


def dominant(subject, batches, steps, path, **options):
    """The two functions of ours in which most time is spent."""
    profile = cProfile.Profile()
    profile.runcall(train, subject, batches, steps, path, **options)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = {
        f"{Path(file).stem}.{name}": total
        for (file, _, name), (_, _, _, total, _) in stats.items()
        if "/dualform/" in file and name in MEANT
    }
    whole = sum(v[2] for v in stats.values())
    best = sorted(own, key=own.get, reverse=True)[:2]
    return ", ".join(f"{name} {own[name] / whole:.0%}" for name in best)


MEANT = ("encode_into", "rows", "take", "take_step", "stage", "_digest", "audit", "hand_over", "certificate", "_close")


def main():
    """One line a network and mode."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--folder", type=Path, default=Path("runs/overheads"))
    options.add_argument("--only", nargs="*", default=list(SUBJECTS))
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    modes = {"tape, float16": {}, "ledger, 4 groups": {"keep": "ledger", "by": "source"}}
    lines = []
    for name in asked.only:
        subject = SUBJECTS[name]
        batches = subject.batches()
        train(subject, batches, 5)
        times = {mode: [] for mode in ("bare", *modes)}
        for _ in range(asked.repeats):
            times["bare"].append(train(subject, batches, asked.steps))
            for mode, settings in modes.items():
                times[mode].append(train(subject, batches, asked.steps, asked.folder / "memory", **settings))
        bare = [1000 * t / asked.steps for t in times["bare"]]
        for mode, settings in modes.items():
            ratio = statistics.median(t / b for t, b in zip(times[mode], times["bare"], strict=True))
            why = dominant(subject, batches, asked.steps, asked.folder / "memory", **settings)
            size = sum(f.stat().st_size for f in (asked.folder / "memory").rglob("*") if f.is_file()) / asked.steps
            cells = [
                subject.about,
                mode,
                f"{statistics.median(bare):.1f}",
                f"**{ratio:.2f}**",
                f"{size / 1e6:.2f}",
                why,
            ]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    shutil.rmtree(asked.folder / "memory", ignore_errors=True)
    about = f"AdamW, clipping, {asked.steps} steps, {asked.threads} torch thread(s), median of {asked.repeats} repeats"
    head = [
        f"{about} in turns, closing and",
        "certificate included. The share of a function is that of a profiled run.",
        "",
        "| network | mode | bare, ms a step | recorded / bare | MB on disk a step | most time in |",
        "|---|---|---|---|---|---|",
    ]
    save("overheads", "\n".join([*head, *lines, "", f"Machine: {machine()}."]))


if __name__ == "__main__":
    main()
