"""A transformer of today, trained on real data and recorded: do its heads separate tokens as the theory says?

A language model of characters on Aesop's fables, and a classifier of spoken vowels. All weights at all moments come
from the memory, and so do the training examples that each head's separating direction is made of.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform import data, svm
from dualform.errors import QueryError
from dualform.models import SeriesClassifier, TransformerLM
from dualform.show.views.render import as_plain
from dualform.svm.heads.alignment import cosine_of
from experiments.runs import Run, console

from .settings import TrainedSettings

MATTER = 5
"""Training examples, support tokens and kinds of tokens that are kept of a head."""


@dataclass(frozen=True)
class Task:
    """Training examples, and test examples that heads are looked at with; ``words`` are what tokens stand for."""

    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    padding: Tensor | None
    asked: Any
    items: Tensor | None
    targets: Tensor
    words: list[str] | None

    def given(self, index: Tensor) -> tuple[Tensor, ...]:
        """What the network is called with."""
        return (self.x[index],) if self.padding is None else (self.x[index], self.padding[index])

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Of every token, or of the sequence."""
        return F.cross_entropy(output.flatten(0, -2), y.flatten())

    def passage(self, index: int) -> str:
        """A training example, as far as words can tell."""
        if self.words is None:
            return f"speaker {int(self.y[index])}"
        return "".join(self.words[int(i)] for i in self.x[index])


@cache
def task(settings: TrainedSettings) -> Task:
    """The task of some settings."""
    return (fables if settings.task == "fables" else vowels)(settings)


def fables(settings: TrainedSettings) -> Task:
    """Passages of the fables, one after the other, and their characters one later."""
    words = sorted(set(data.aesop()))
    numbers = {word: i for i, word in enumerate(words)}

    def passages(part: Any, most: int | None = None) -> Tensor:
        ids = torch.tensor([numbers[word] for word in data.aesop(part)])
        return torch.stack([each for each in ids.split(settings.length + 1) if len(each) == settings.length + 1][:most])

    train, test = passages("train", settings.most), passages("test", settings.asked)
    sizes = {"width": settings.width, "heads": settings.heads, "layers": settings.layers, "hidden": settings.hidden}
    return Task(
        lambda: TransformerLM(len(words), settings.length, **sizes), train[:, :-1], train[:, 1:], None, test[:, :-1],
        test[:, :-1], test[:, 1:], words,
    )  # fmt: skip


def vowels(settings: TrainedSettings) -> Task:
    """Series of twelve numbers that two vowels of one speaker are; nine speakers."""
    train, test = (data.series("JapaneseVowels", part) for part in ("train", "test"))
    train, test = data.standardised(train, test)
    length, most = max(part.values.shape[1] for part in (train, test)), settings.most
    some = torch.randperm(len(test.labels), generator=torch.Generator().manual_seed(0))[: settings.asked]
    sizes = {"width": settings.width, "heads": settings.heads, "layers": settings.layers, "hidden": settings.hidden}
    return Task(
        lambda: SeriesClassifier(train.values.shape[2], length, 9, dropout=0.0, **sizes), train.values[:most],
        train.labels[:most], train.padding[:most], (test.values[some], test.padding[some]), None, test.labels[some],
        None,
    )  # fmt: skip


def train(run: Run, settings: TrainedSettings) -> dict[str, Any]:
    """Train, recorded; how well, and how exactly the memory explains the weights."""
    given = task(settings)
    torch.manual_seed(settings.seed)
    model = given.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=settings.decay)
    losses = []
    with dualform.record(model, optimizer, run.memory, dtype="float32", overwrite=True, progress=False) as tape:
        for index in track(
            batches(settings, len(given.x)), "training", settings.steps, console=console, transient=True
        ):
            tape.note(index=index, label=given.y[index].reshape(len(index), -1)[:, 0])
            loss = given.loss(model(*given.given(index)), given.y[index])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    memory, model = dualform.open(run.memory), model.eval()
    with torch.no_grad():
        asked = given.asked if isinstance(given.asked, tuple) else (given.asked,)
        output = model(*asked)
        right = (output.argmax(-1) == given.targets).double().mean()
    errors = dict(memory.certificate.items())
    attention = [error for name, error in errors.items() if ".attn." in name and name.endswith("weight")]
    return {
        "loss": statistics.mean(losses[-20:]),
        "first_loss": losses[0],
        "test_loss": given.loss(output, given.targets).item(),
        "test_accuracy": float(right),
        "certificate_of_attention": max(attention),
        "certificates": errors,
        "memory_megabytes": round(sum(file.stat().st_size for file in run.memory.rglob("*")) / 1e6),
        "marks": len(memory.certificate.marks),
    }


def batches(settings: TrainedSettings, count: int) -> Iterator[Tensor]:
    """Which examples each step sees: all in a random order, then again in another."""
    random, left = torch.Generator().manual_seed(1000 + settings.seed), settings.steps
    while True:
        for index in torch.randperm(count, generator=random).split(settings.batch):
            if not left:
                return
            left -= 1
            yield index


def heads(run: Run, settings: TrainedSettings) -> dict[str, Any]:
    """Every head at every moment, at all queries; and at the end also where it is sharp, and what built it."""
    given, memory = task(settings), dualform.open(run.memory)
    torch.manual_seed(settings.seed)
    model = given.make()
    options: dict[str, Any] = {
        "queries": settings.queries,
        "null": settings.null,
        "progress": False,
        "items": given.items,
    }
    path = svm.trajectory(
        model, given.asked, memory, steps=settings.moments, nuclear=False,
        loss=lambda output: given.loss(output, given.targets), **options,
    )  # fmt: skip
    moments = [
        {"step": step, "layer": layer, "changed": path.changes(layer, head.head)[i], **head.row()}
        for i, (step, found) in enumerate(path)
        for layer, report in found.items()
        for head in report
    ]
    weights = memory.weights(progress=False)
    last = svm.reports(model, given.asked, weights=weights, **options, mixtures=settings.mixtures)
    ends = [
        last_of(given, memory, model, weights, layer, head, options, settings)
        for layer, report in last.items()
        for head in report
    ]
    return as_plain({"moments": moments, "last": ends})


def last_of(
    given: Task, memory: dualform.Memory, model: nn.Module, weights: Any, layer: str, head: svm.HeadReport,
    options: dict[str, Any], settings: TrainedSettings,
) -> dict[str, Any]:  # fmt: skip
    """One head at the end of training."""
    found: dict[str, Any] = {"layer": layer, **head.row(), "range": head.null.range}
    if head.mixture is not None:
        fits = head.mixture.feasible
        found["mixture"] = {
            "feasible": fits,
            "cosine": cosine_of(head.W, head.mixture.predicted(head.W)) if fits else None,
            "finite": cosine_of(head.W, head.mixture.finite.W) if head.mixture.finite.feasible else None,
        }
    found["sharp"] = sharp(given, model, weights, layer, head.head, options, settings.above)
    if head.items is not None and given.words is not None:
        found["items"] = [(given.words[item], share) for item, share in list(head.by_item().items())[:MATTER]]
    built = svm.origin(memory, layer, head).by("index", progress=False)
    found["origin"] = {
        "total": built.total,
        "initial": built.initial,
        "residual": max(abs(float(way.residual[0])) for way in (built.queries, built.keys) if way.residual is not None),
        "above_zero": sum(each.mean > 0 for each in built) / len(built),
        "largest": [(each.name, each.mean, given.passage(each.name)) for each in built.largest(MATTER)],
    }
    return found


def sharp(
    given: Task, model: nn.Module, weights: Any, layer: str, head: int, options: dict[str, Any], above: float
) -> dict[str, Any] | None:
    """The same head at the queries where it puts most of its weight on one token; None where there are none."""
    try:
        found = svm.reports(
            model, given.asked, layers=[layer], heads=[head], weights=weights, above=above, nuclear=False, **options
        )[layer][head]
    except QueryError:
        return None
    return {**found.row(), "range": found.null.range}
