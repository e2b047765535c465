"""Does any change of weights, optimiser state or gradients outside of the recorded steps pass silently?

Each try trains a small network, recorded, and changes something once: a bit of a weight or of the optimiser's state
outside its step, or a gradient by at least 1e-4 of its norm (1e-6 in float64), in one of the ways that people have. It
is noticed if the memory is marked, or if its certificate is ten times that of the same run without the change. Every
run is also made without it: then nothing may be marked.

python benchmarks/edits.py [--tries 2000] [--seed 0]
"""

import argparse
import random
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
from paper_run import machine, save
from torch import nn, optim
from torch.nn import functional as F

import dualform

STEPS, BATCH = 6, 5
SIZES = {"small": (6, 5, 3), "wide": (90, 70, 4)}
OPTIMISERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda p: optim.AdamW(p, lr=3e-3),
    "RMSprop": lambda p: optim.RMSprop(p, lr=3e-3),
}
WHERE = ("a bit of a weight", "a row of a weight", "a bit of the state", "the state", "a gradient")


class Try:
    """A run, and what is changed in it: all of it follows from the seed."""

    def __init__(self, seed):
        self.random = draw = random.Random(seed)
        self.where = draw.choice(WHERE)
        self.size, self.optimiser = draw.choice(list(SIZES)), draw.choice(list(OPTIMISERS))
        if "state" in self.where:
            self.optimiser = draw.choice([name for name in OPTIMISERS if name != "SGD"])
        self.dtype, self.kept = draw.choice(
            [(torch.float32, "float16"), (torch.float32, "float32"), (torch.float64, "float64")]
        )
        self.clipped, self.step = draw.random() < 0.5, draw.randrange(1, STEPS)
        self.seed = seed

    def run(self, path, changed):
        torch.manual_seed(self.seed)
        widths = SIZES[self.size]
        model = nn.Sequential(nn.Linear(*widths[:2]), nn.Tanh(), nn.Linear(*widths[1:])).to(self.dtype)
        optimizer = OPTIMISERS[self.optimiser](model.parameters())
        parameter = self.random.choice(list(model.parameters()))
        if self.where == "a row of a weight":
            parameter = model[0].weight
        with warnings.catch_warnings(), dualform.record(
            model, optimizer, path, dtype=self.kept, overwrite=True, progress=False
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            for step in range(STEPS):
                now = changed and step == self.step
                x, y = torch.randn(BATCH, widths[0], dtype=self.dtype), torch.randint(widths[-1], (BATCH,))
                hook = None
                if now and self.where == "a gradient" and self.random.random() < 0.3:
                    hook = parameter.register_hook(self._changed_gradient)
                F.cross_entropy(model(x), y).backward()
                if hook is not None:
                    hook.remove()
                elif now and self.where == "a gradient":
                    self._write(parameter.grad, self._changed_gradient(parameter.grad))
                if self.clipped:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if now and self.where != "a gradient":
                    self._edit(parameter, optimizer)
                optimizer.step()
                optimizer.zero_grad(set_to_none=self.random.random() < 0.5)
        return dualform.open(path).certificate

    def _edit(self, parameter, optimizer):
        if self.where == "a bit of a weight":
            self._write(parameter, flipped(parameter, self.random))
        elif self.where == "a row of a weight":
            new = parameter.detach().clone()
            new[self.random.randrange(len(new))].normal_()
            self._write(parameter, new)
        elif self.where == "a bit of the state":
            tensors = [t for t in optimizer.state[parameter].values() if t.shape == parameter.shape]
            tensor = self.random.choice(tensors)
            self._write(tensor, flipped(tensor, self.random))
        elif self.random.random() < 0.5:
            optimizer.state.clear()
        else:
            state = optimizer.state_dict()
            for entries in state["state"].values():
                for key in ("momentum_buffer", "exp_avg", "square_avg"):
                    if key in entries:
                        entries[key] = entries[key] * 1.001
            optimizer.load_state_dict(state)

    def _write(self, tensor, new):
        """As people do it: in place, through ``.data``, or through the memory of a NumPy array."""
        way = self.random.choice(["no_grad", "data", "numpy"])
        if way == "numpy":
            tensor.detach().numpy()[...] = new.detach().numpy()
            return
        with torch.no_grad():
            (tensor.data if way == "data" else tensor).copy_(new)

    def _changed_gradient(self, grad):
        draw, new = self.random, grad.detach().clone()
        least = 1e-4 if self.dtype == torch.float32 else 1e-6
        size = float(new.norm()) * least * 10 ** draw.uniform(0.05, 4)
        kind = draw.choice(["entry", "row", "column", "noise"])
        change = torch.zeros_like(new)
        rows = change.view(len(change), -1)
        if kind == "entry":
            rows[draw.randrange(rows.shape[0]), draw.randrange(rows.shape[1])] = 1.0
        elif kind == "row":
            rows[draw.randrange(rows.shape[0])] = torch.randn(rows.shape[1]).to(rows)
        elif kind == "column":
            rows[:, draw.randrange(rows.shape[1])] = torch.randn(rows.shape[0]).to(rows)
        else:
            change.normal_()
        across = change - new * (change * new).sum() / new.square().sum()  # one common factor would be explained
        if float(across.norm()) < 0.1 * float(change.norm()):
            across = torch.randn_like(new)
        return new + across * size / across.norm()


def flipped(tensor, draw):
    """The same tensor but for one bit of one entry, not of its exponent."""
    new = tensor.detach().clone()
    bits = new.view(-1).view(torch.int32 if new.dtype == torch.float32 else torch.int64)
    bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(23 if new.dtype == torch.float32 else 52)
    return new


def attempt(seed, folder):
    """What becomes of one try: where the change was, "marked", "certificate" or "silent"; and the marks without it."""
    clean = Try(seed).run(folder, changed=False)
    one = Try(seed)
    certificate = one.run(folder, changed=True)
    shown = any(error > 10 * max(clean[name], 1e-14) for name, error in certificate.items())
    return one.where, "marked" if certificate.marks else "certificate" if shown else "silent", clean.marks


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--tries", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    torch.set_num_threads(1)
    counts, false, silent = Counter(), 0, []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(asked.seed, asked.seed + asked.tries):
            where, outcome, marks = attempt(seed, Path(folder))
            counts[where, outcome] += 1
            false += bool(marks)
            if outcome == "silent":
                silent.append(seed)
                print(f"silent: seed {seed}, {where}", flush=True)
    lines = "\n".join(
        f"| {where} | {sum(row)} | {' | '.join(map(str, row))} |"
        for where in WHERE
        for row in [[counts[where, outcome] for outcome in ("marked", "certificate", "silent")]]
    )
    save(
        "edits",
        f"""{asked.tries:,} short runs (SGD, momentum, AdamW, RMSprop; float32 and float64; weights of 15 to 6,300
entries), in each of which something is changed once outside of the recorded steps: a bit, a row, the optimiser's state,
or a gradient by at least 1e-4 of its norm (1e-6 in float64). Of the same runs without a change {false} were marked.
Seeds {asked.seed} to {asked.seed + asked.tries - 1}.

| what is changed | tries | marked | seen in the certificate alone | in silence |
|---|---|---|---|---|
{lines}

Machine: {machine()}.""",
    )


if __name__ == "__main__":
    main()
