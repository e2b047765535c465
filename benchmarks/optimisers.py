"""How exact the dual form is for every optimiser on every kind of layer: small networks, trained and rebuilt.

python benchmarks/optimisers.py [--folder runs/optimisers] [--only AdamW lstm float32] [--steps 200] [--jobs 2]

Every cell is kept in the folder as it comes, so a run that was stopped goes on where it was. --only takes words that
the name of a cell must all contain ("AdamW, lstm, float32"); such cells are printed, and no document is written.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from paper_run import machine, save
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.rules.signs import LION

STEPS, BATCH, EXAMPLES, CLASSES, TOKENS, CLIP = 200, 16, 512, 3, 20, 1.0
PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float32}
"""What slots are kept in, and what the network is trained in."""
BARS = {"float64": 1e-10, "float32": 1e-4}
AT_THE_END = ("head.weight", "body.out_proj.weight")
"""Weights whose gradients have the rank of the errors of the softmax."""
LARGE = 1e-2
"""What a cell without a bar may be before it needs a sentence."""

# ------------------------------------------------------------------------------------------- networks


class Around(nn.Module):
    """A layer of some kind, and a linear layer that reads what comes of it."""

    def __init__(self, body: nn.Module, width: int, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.read = body, nn.Linear(width, CLASSES), read

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self.body, x))


class Tied(nn.Module):
    """A word model whose output layer shares the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(TOKENS, 12), nn.Linear(12, 12), nn.Linear(12, TOKENS)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(self.embed(x)).tanh().mean(1))


class Turned(nn.Module):
    """``transformers.pytorch_utils.Conv1D`` without that package: a linear layer with its weight turned."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(d_in, d_out) * 0.3), nn.Parameter(torch.zeros(d_out))
        self.nf = d_out

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], self.nf)


Turned.__module__, Turned.__qualname__ = "transformers.pytorch_utils", "Conv1D"


def flat(body: nn.Module, x: Tensor) -> Tensor:
    return body(x).tanh().flatten(1)


def mean(body: nn.Module, x: Tensor) -> Tensor:
    return body(x).tanh().mean(1)


def last(body: nn.Module, x: Tensor) -> Tensor:
    return body(x)[0][:, -1]


def attention(body: nn.Module, x: Tensor) -> Tensor:
    return body(x, x, x, need_weights=False)[0].mean(1)


class Network(NamedTuple):
    """How a network is made, and the shape of an example (of tokens, where those are ``words``)."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: bool = False


NETWORKS: dict[str, Network] = {
    "linear": Network(lambda: Around(nn.Linear(12, 24), 24, flat), (12,)),
    "linear, turned": Network(lambda: Around(Turned(12, 24), 24, mean), (6, 12)),
    "conv1d": Network(lambda: Around(nn.Conv1d(4, 8, 3, stride=2, padding=1), 48, flat), (4, 12)),
    "conv2d": Network(lambda: Around(nn.Conv2d(2, 6, 3, stride=2, padding=1), 54, flat), (2, 6, 6)),
    "conv2d, grouped": Network(lambda: Around(nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), 72, flat), (4, 6, 6)),
    "embedding": Network(lambda: Around(nn.Embedding(TOKENS, 12), 12, mean), (6,), words=True),
    "embedding, tied": Network(Tied, (6,), words=True),
    "lstm": Network(lambda: Around(nn.LSTM(8, 12, batch_first=True), 12, last), (6, 8)),
    "gru": Network(lambda: Around(nn.GRU(8, 12, batch_first=True), 12, last), (6, 8)),
    "rnn": Network(lambda: Around(nn.RNN(8, 12, batch_first=True), 12, last), (6, 8)),
    "attention": Network(lambda: Around(nn.MultiheadAttention(12, 3, batch_first=True), 12, attention), (6, 12)),
}


def examples(network: Network) -> tuple[Tensor, Tensor]:
    """Inputs, and the labels that a fixed random network of the same make gives them."""
    random = torch.Generator().manual_seed(1)
    if network.words:
        x = torch.randint(TOKENS, (EXAMPLES, *network.shape), generator=random)
    else:
        x = torch.randn(EXAMPLES, *network.shape, generator=random, dtype=torch.float64)
    torch.manual_seed(2)
    teacher = network.make().double()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(2.0)
        logits = teacher(x)
    return x, (logits - logits.mean(0)).argmax(1)


# ------------------------------------------------------------------------------------------- optimisers


class Lion(optim.Optimizer):
    """Lion as it is published: Chen et al. (2023), algorithm 2."""

    def __init__(self, params: Any, lr: float, betas: tuple = (0.9, 0.99), weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                inner, outer = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_((inner * average + (1 - inner) * p.grad).sign(), alpha=group["lr"])
                average.mul_(outer).add_(p.grad, alpha=1 - outer)


def alone(make: type, **settings: Any) -> Callable[[nn.Module], list[optim.Optimizer]]:
    """One optimiser for all parameters."""
    return lambda model: [make(model.parameters(), **settings)]


def muon(model: nn.Module) -> list[optim.Optimizer]:
    """Muon for all matrices, AdamW for convolutions and biases."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [optim.Muon(matrices, lr=5e-3), *([optim.AdamW(others, lr=1e-2)] if others else [])]


OPTIMISERS: dict[str, Callable[[nn.Module], list[optim.Optimizer]]] = {
    "SGD": alone(optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "ASGD": alone(optim.ASGD, lr=0.3, weight_decay=1e-3),
    "Adam": alone(optim.Adam, lr=1e-2, weight_decay=1e-3),
    "AdamW": alone(optim.AdamW, lr=1e-2),
    "AdamW, amsgrad": alone(optim.AdamW, lr=1e-2, amsgrad=True),
    "NAdam": alone(optim.NAdam, lr=1e-2),
    "RAdam": alone(optim.RAdam, lr=1e-2),
    "Adamax": alone(optim.Adamax, lr=1e-2),
    "RMSprop": alone(optim.RMSprop, lr=1e-3, centered=True, momentum=0.9),
    "Adagrad": alone(optim.Adagrad, lr=5e-2),
    "Adadelta": alone(optim.Adadelta, lr=1.0),
    "Rprop": alone(optim.Rprop, lr=1e-3, step_sizes=(1e-6, 1e-2)),
    "Adafactor": alone(optim.Adafactor, lr=5e-2),
    "Lion": alone(Lion, lr=3e-3),
    "Muon": muon,
}


# ------------------------------------------------------------------------------------------- cells


@dataclass(frozen=True)
class Cell:
    """What came of one training: of each parameter the error and its floor, and how well the labels were learned."""

    optimiser: str
    kind: str
    precision: str
    errors: Mapping[str, float]
    floor: Mapping[str, float]
    under_muon: tuple[str, ...]
    before: float
    after: float
    right: float
    marks: tuple[str, ...]

    @property
    def worst(self) -> str:
        """The parameter whose error is largest, measured by its bar."""
        return max(self.errors, key=lambda name: self.errors[name] / self.bar(name))

    def bar(self, name: str) -> float:
        """What the error of a parameter should not exceed. Muon rounds its own step, and float16 is only stated."""
        if name in self.under_muon or self.precision not in BARS:
            return 1.0
        return max(BARS[self.precision], self.floor[name])

    @property
    def beyond(self) -> list[str]:
        """The parameters beyond their bars."""
        return [name for name, error in self.errors.items() if error > self.bar(name)]


def train(optimiser: str, kind: str, precision: str, path: Path, steps: int = STEPS) -> tuple[Cell, nn.Module]:
    """Train a network, record it, and compare every entry of it with what the memory rebuilds."""
    network, dtype = NETWORKS[kind], PRECISIONS[precision]
    x, y = examples(network)
    x = x if network.words else x.to(dtype)
    torch.manual_seed(0)
    model = network.make().to(dtype)
    optimizers = OPTIMISERS[optimiser](model)
    random, order, losses = torch.Generator().manual_seed(3), torch.empty(0, dtype=torch.long), []
    with dualform.record(model, optimizers, path, dtype=precision, rules={Lion: LION}, progress=False) as tape:
        for _ in range(steps):
            if not len(order):
                order = torch.randperm(EXAMPLES, generator=random)
            index, order = order[:BATCH], order[BATCH:]
            tape.note(index=index, label=y[index])
            loss = F.cross_entropy(model(x[index]), y[index])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    memory = dualform.open(path, rules=[LION])
    found = memory.check(model, full=True, progress=False)
    with torch.no_grad():
        right = (model(x).argmax(1) == y).double().mean().item()
    names = {id(p): name for name, p in model.named_parameters()}
    muons = [o for o in optimizers if type(o).__name__ == "Muon"]
    few = max(1, min(32, steps // 2))
    cell = Cell(
        optimiser, kind, precision, dict(found.errors), dict(found.floor),
        tuple(names[id(p)] for o in muons for group in o.param_groups for p in group["params"]),
        sum(losses[:few]) / few, sum(losses[-few:]) / few, right,
        tuple(f"{mark.name}: {mark.message}" for mark in found.marks),
    )  # fmt: skip
    return cell, model


def cell_at(folder: Path, steps: int, name: tuple[str, str, str]) -> Cell:
    """A cell, from the folder if it is there."""
    torch.set_num_threads(1)
    file = folder / f"{', '.join(name)}, {steps}.json"
    if not file.exists():
        with tempfile.TemporaryDirectory() as path:
            cell, _ = train(*name, Path(path) / "memory", steps)
        file.with_suffix(".partial").write_text(json.dumps(asdict(cell)))
        file.with_suffix(".partial").rename(file)
    return Cell(**json.loads(file.read_text()))


# ------------------------------------------------------------------------------------------- the document

HEAD = """# Every optimiser on every kind of layer

Small networks learn the labels that a fixed random network of the same make gives to {examples} examples: {steps} steps
of {batch}, gradient norm clipped at {clip}. Each is recorded, rebuilt from its slots alone and compared entry by entry.
A number is the worst ‖W − rebuilt‖ / ‖W − W₀‖ of all parameters of the network."""

TITLES = {
    "float64": """## float64 network, float64 memory

Bar: 1e-10.""",
    "float32": """## float32 network, float32 memory

Bar: 1e-4, or the rounding floor of training where that is higher. The floor stands in brackets.""",
    "float16": """## float32 network, float16 memory

No bar: what half the space costs.""",
    "learned": """## What was learned

Right answers after training, in per cent of the {examples} examples (three classes; twenty for the tied embedding),
of the float64 networks.""",
}

NOTES = {
    "m": """Muon computes its step in bfloat16. The memory splits the step as it would be without that rounding, so what
  stands here is the rounding part of the change. It is largest where the gradient lacks directions: the errors of a
  softmax sum to zero over the classes, so the three rows of a head have a gradient of rank two (as has the output
  projection of attention right before it), and the iterations that should make all singular values one blow up what
  bfloat16 leaves in the others: 99.9 % of the rounding part of the linear network's head lies there. All other
  matrices are at {inner} and below. Muon takes matrices alone; convolutions and biases are under AdamW, and within
  its bar.""",
    "k": """The bias of the keys of attention shifts all scores of a query alike, so it changes nothing, and its
  gradient is zero but for rounding. Slots in float32 and float64 keep that remainder to the last bit. Slots in float16
  do not, and a rule that divides it by its own size moves the bias by another amount. The network computes the same
  with either.""",
    "s": """The step is a sign, or begins as one (Adam and its kin divide the first gradient by its own size). Where an
  entry of the gradient is as small as what float16 rounds away, the sign turns, and the entry goes the other way by a
  whole step. For the convolution conv1d it is one entry of its eight biases, at the first step.""",
    "c": """One of the eight biases of the convolution has at the first step a gradient of 9e-07 that is left of terms
  of 0.14 altogether, so float32 knows it to half a per cent. RMSprop divides it by a tenth of its own size and 1e-08,
  which leaves a part of that half per cent in its first steps. In float64 the same entry stands out.""",
    "?": "Not explained yet.",
}
"""Why a cell is beyond its bar, or beyond the others."""


def note_of(cell: Cell) -> str:
    """The letter of the note that explains a cell; none where there is nothing to explain."""
    name = cell.worst
    if name in cell.under_muon:
        return "m"
    if cell.precision == "float16" and cell.errors[name] > LARGE:
        return "k" if name.endswith("in_proj_bias") else "s"
    if cell.beyond and (cell.optimiser, cell.kind, name) == ("RMSprop", "conv1d", "body.bias"):
        return "c"
    return "?" if cell.beyond else ""


def document(cells: Mapping[tuple[str, str, str], Cell], steps: int) -> str:
    """All tables, and a sentence for every note in them."""
    parts = [HEAD.format(examples=EXAMPLES, steps=steps, batch=BATCH, clip=CLIP)]
    used: dict[str, None] = {}
    for title in TITLES:
        precision = "float64" if title == "learned" else title
        lines = [f"| | {' | '.join(NETWORKS)} |", f"|---|{'---|' * len(NETWORKS)}"]
        for optimiser in OPTIMISERS:
            row = [cells[optimiser, kind, precision] for kind in NETWORKS]
            lines.append(f"| {optimiser} | {' | '.join(_text(cell, title, used) for cell in row)} |")
        parts += [TITLES[title].format(examples=EXAMPLES), "\n".join(lines)]
    inner = max(
        error
        for cell in cells.values()
        for name, error in cell.errors.items()
        if cell.precision == "float64" and name in cell.under_muon and name not in AT_THE_END
    )
    parts += ["## Notes", "\n".join(f"- [{note}] {NOTES[note].format(inner=f'{inner:.1e}')}" for note in used)]
    return "\n\n".join([*parts, f"Machine: {machine()}."])


def _text(cell: Cell, title: str, used: dict[str, None]) -> str:
    if title == "learned":
        return f"{100 * cell.right:.0f}"
    name, note = cell.worst, note_of(cell)
    used |= {note: None} if note else {}
    floor = f" ({cell.floor[name]:.1e})" if title == "float32" else ""
    return f"{cell.errors[name]:.1e}{floor}{f' [{note}]' if note else ''}"


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, default=Path("runs/optimisers"))
    options.add_argument("--only", nargs="+", default=[], help="words that the name of a cell must all contain")
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--jobs", type=int, default=2)
    asked = options.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    names = [(o, k, p) for p in PRECISIONS for o in OPTIMISERS for k in NETWORKS]
    names = [name for name in names if all(word in ", ".join(name) for word in asked.only)]
    cells = {}
    with ProcessPoolExecutor(asked.jobs, get_context("spawn")) as pool:
        for name, cell in zip(names, pool.map(partial(cell_at, asked.folder, asked.steps), names), strict=True):
            cells[name] = cell
            worst = cell.worst
            print(*name, worst, f"{cell.errors[worst]:.1e}, floor {cell.floor[worst]:.1e}", *cell.marks, sep=", ")
    if not asked.only:
        save("optimisers", document(cells, asked.steps))


if __name__ == "__main__":
    main()
