"""Trains one architecture bare and recorded, and finds out how exactly it is recorded, certified and credited."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from architectures import EXAMPLES, Architecture
from torch import Tensor, nn, optim

import dualform
from dualform.errors import DualformWarning
from dualform.explain import Certificate, Ledger

STEPS = 8
AGREE = 10.0
"""The certificate and the full check agree within this factor, unless both lie within it of the rounding floor."""


@dataclass(frozen=True)
class Credit:
    """Parts of single examples in one layer beside the gradients of single examples: the largest relative difference;
    None where the memory says that the layer's rows are of unknown examples.
    """

    layer: str
    error: float | None


@dataclass(frozen=True)
class Verdict:
    """What is known of one architecture after the sweep."""

    same_bits: bool
    certificate: Certificate
    full: Certificate
    credits: tuple[Credit, ...]

    @property
    def disagreeing(self) -> list[str]:
        """The parameters of which the certificate says something else than the full check."""
        return [name for name in self.full if not self._agree(name)]

    def _agree(self, name: str) -> bool:
        live, full, floor = self.certificate[name], self.full[name], self.full.floor[name]
        if max(live, full) <= AGREE * floor:
            return True
        return max(live, full) <= AGREE * max(min(live, full), floor)

    @property
    def without_reason(self) -> list[str]:
        """The parameters of the rest that nothing is said of."""
        return [name for name in self.full.rest if not self.full.reasons.get(name)]

    @property
    def worst_credit(self) -> float:
        """The largest error of a part."""
        return max((credit.error for credit in self.credits if credit.error is not None), default=0.0)


def losses(architecture: Architecture, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One loss an example: how far its output is from a fixed target."""
    output = architecture.read(model(**batch)).double().flatten(1)
    target = torch.linspace(-1, 1, output.shape[1], dtype=torch.float64)
    return (output - target).square().mean(1)


def train(architecture: Architecture, path: Path | None) -> nn.Module:
    """Some steps of AdamW as people train, in float32; recorded where there is a path."""
    model, random = architecture.make(torch.float32), torch.Generator().manual_seed(1)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(2)

    def step(note: Callable[..., None]) -> None:
        note(index=torch.arange(EXAMPLES))
        batch = {
            name: value.float() if value.is_floating_point() else value
            for name, value in architecture.batch(random, EXAMPLES).items()
        }
        losses(architecture, model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if path is None:
        for _ in range(STEPS):
            step(lambda **columns: None)
    else:
        with dualform.record(model, optimizer, path, dtype="float32", progress=False, overwrite=True) as tape:
            for _ in range(STEPS):
                step(tape.note)
    return model


def credits_of(architecture: Architecture, path: Path) -> tuple[Credit, ...]:
    """One step of gradient descent: in three layers the part of each example is minus the gradient of its loss.

    Statistics of the batch are fixed, since normalising over a batch mixes its examples.
    """
    model, batch = architecture.make().eval(), architecture.batch(torch.Generator().manual_seed(3), EXAMPLES)
    before = copy.deepcopy(model)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    with dualform.record(model, optimizer, path, dtype="float64", progress=False, overwrite=True) as tape:
        tape.note(index=torch.arange(EXAMPLES))
        losses(architecture, model, batch).mean().backward()
        optimizer.step()
    memory = dualform.open(path)
    unknown = {mark.name for mark in memory.certificate.marks if mark.kind == "unknown-visits"}
    ledger, gradients = memory.ledger("index"), [_gradients(architecture, before, batch, i) for i in range(EXAMPLES)]
    layers = [layer for layer in memory.store.manifest.layers if memory.store.slots(layer.name)]
    chosen = {place: layers[place] for place in (0, len(layers) // 2, len(layers) - 1)} if layers else {}
    return tuple(
        Credit(layer.name, None if layer.name in unknown else _credit(ledger, layer.weights[0], gradients))
        for layer in chosen.values()
    )


def _gradients(
    architecture: Architecture, model: nn.Module, batch: dict[str, Tensor], example: int
) -> dict[str, Tensor]:
    """The gradients of the loss of one example, alone in its batch."""
    model.zero_grad()
    one = {name: value[example : example + 1] for name, value in batch.items()}
    (losses(architecture, model, one).sum() / EXAMPLES).backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def _credit(ledger: Ledger, weight: str, gradients: list[dict[str, Tensor]]) -> float:
    """The largest difference between a part and a gradient. Rows that belong to all examples are in the group None,
    of which each example has a share that is not told: they must make up the rest of the sum.
    """
    size = max(float(each[weight].norm()) for each in gradients)
    if None in ledger and bool(ledger[None][weight].any()):
        parts = [*(ledger[group][weight] for group in ledger), *(each[weight] for each in gradients)]
        return float(torch.stack(parts).sum(0).norm()) / size
    return max(float((ledger[i][weight] + gradients[i][weight]).norm()) / size for i in range(EXAMPLES))


def examine(architecture: Architecture, folder: Path) -> Verdict:
    """Train an architecture bare, recorded, and for the parts of single examples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DualformWarning)
        bare, recorded = train(architecture, None), train(architecture, folder / "training")
        credits = credits_of(architecture, folder / "credit")
    memory = dualform.open(folder / "training")
    theirs, ours = bare.state_dict(), recorded.state_dict()
    same = theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    return Verdict(same, memory.certificate, memory.check(recorded, full=True, progress=False), credits)
