"""The demo: train a small network on real digits while recording it, then ask it what three predictions are made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from rich.console import Console
from torch import Tensor, nn

from dualform.data import digits
from dualform.explain import Certificate, Groups, Hits, Memory, Timeline, open_memory
from dualform.models import MLP
from dualform.record import record

from .. import figures
from ..examples import Examples
from ..figures import Figure
from ..report import write_report
from ..text import MASKED, certificate_table, disk_size, groups_table, hits_table, size, sum_check
from ..views import ExamplePlace, Explorer, WorkDesk

STEPS, BATCH, HELD_OUT, SHOWN, CURVE = 500, 64, 500, 8, 300
WIDTHS, LAYER = (784, 128, 10), "fc2"


@dataclass(frozen=True)
class DemoDigits:
    """The digits, shuffled once: some to train on, some to ask about. ``x`` is what the network sees of them."""

    images: UInt8[Tensor, "N 28 28"]
    x: Float[Tensor, "N 28 28"]
    labels: Int[Tensor, " N"]
    train: Int[Tensor, " n"]
    test: Int[Tensor, " m"]


@dataclass(frozen=True)
class DemoAnswer:
    """One test image that the network was asked about. ``query`` is its place in the answers, which hold several."""

    title: str
    row: int
    picture: UInt8[Tensor, "height width"]
    label: int
    query: int
    logits: Float[Tensor, " classes"]
    hits: Hits
    groups: Groups
    recalled: Groups
    line: Timeline
    masked: str
    masked_logits: Float[Tensor, " classes"]

    @property
    def predicted(self) -> int:
        """The class with the largest logit."""
        return int(self.logits.argmax())


@dataclass(frozen=True)
class DemoFindings:
    """What came out. ``curve`` are many more hits of the same images: how sharp the spotlight is."""

    accuracy: float
    certificate: Certificate
    asked: Sequence[DemoAnswer]
    curve: Hits


def run(out: Path, steps: int = STEPS, console: Console | None = None) -> Path:
    """Run the demo and give its report. All it makes lies in ``out``; a second run replaces it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for a network this small a second thread costs more than it brings
    try:
        return _run(out, steps, console or Console(highlight=False))
    finally:
        torch.set_num_threads(threads)


def _run(out: Path, steps: int, say: Console) -> Path:
    start = perf_counter()
    say.print("[bold]1. Train a network, and record it[/]")
    data = load()
    model = train(data, out / "memory", steps)
    memory, accuracy = open_memory(out / "memory"), accuracy_of(model, data)
    say.print(f"{memory.step} steps, {len(memory.visits):,} visits, {size(disk_size(memory))} on disk. "
              f"{accuracy:.1%} of {len(data.test)} test digits are right.\n")  # fmt: skip
    say.print("[bold]2. Does the memory explain the weights?[/] Every entry, rebuilt from the recorded training alone:")
    certificate = memory.check(model, full=True)
    say.print(certificate_table(certificate))
    say.print(f"[bold]3. What are three predictions made of?[/] Asked of the last layer, {LAYER}.\n")
    asked, curve = ask(memory, model, data)
    for each in asked:
        tell(say, each)
    report = save(out, memory, data, DemoFindings(accuracy, certificate, asked, curve))
    say.print(f"[bold]4. Look at it[/] (all this took {perf_counter() - start:.0f} s)")
    say.print(f"The report is {report}, and the figures lie beside it. Go on asking:", soft_wrap=True)
    say.print(*(f"  {line}" for line in commands(out)), sep="\n", soft_wrap=True)
    return report


def load() -> DemoDigits:
    """The digits that come with a package, so nothing is downloaded."""
    images, labels = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return DemoDigits(images, images / 255, labels, order[HELD_OUT:], order[:HELD_OUT])


def train(data: DemoDigits, path: Path, steps: int) -> nn.Module:
    """An ordinary training loop, with momentum and clipping; recording adds two lines to it."""
    torch.manual_seed(0)
    model = MLP(*WIDTHS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with record(model, optimizer, path, dtype="float32", overwrite=True) as tape:
        for index in batches(data.train, steps):
            tape.note(index=index, label=data.labels[index])
            nn.functional.cross_entropy(model(data.x[index]), data.labels[index]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


def batches(train: Int[Tensor, " n"], steps: int) -> Iterator[Int[Tensor, " b"]]:
    """So many batches, in a new order each time round."""
    draw = torch.Generator().manual_seed(1)
    while steps > 0:
        for index in train[torch.randperm(len(train), generator=draw)].split(BATCH)[:steps]:
            yield index
            steps -= 1


def choose(probabilities: Float[Tensor, "m classes"], labels: Int[Tensor, " m"]) -> dict[str, int]:
    """Three test images: a sure one, a close call, and the surest mistake (if none is wrong, the least sure of all)."""
    best, predicted = probabilities.max(1)
    right = predicted == labels
    by_doubt = torch.where(right, best, 2.0).argsort().tolist()
    sure = int(torch.where(right, best, -1.0).argmax())
    if right.all():
        least, close = by_doubt[:2]
        return {
            "A sure prediction": sure,
            "A close call": close,
            "The least sure of all (no test digit is wrong)": least,
        }
    surest_mistake = int(torch.where(right, -1.0, best).argmax())
    return {"A sure prediction": sure, "A close call": by_doubt[0], "A mistake": surest_mistake}


def accuracy_of(model: nn.Module, data: DemoDigits) -> float:
    """The share of test digits that the network gets right."""
    with torch.no_grad():
        return (model(data.x[data.test]).argmax(1) == data.labels[data.test]).double().mean().item()


def ask(memory: Memory, model: nn.Module, data: DemoDigits) -> tuple[list[DemoAnswer], Hits]:
    """What the last layer recalls for each chosen image: the top examples, sums by label, and what a mask changes."""
    with torch.no_grad():
        chosen = choose(model(data.x[data.test]).softmax(1), data.labels[data.test])
    which = data.test[list(chosen.values())]
    spot = memory.attend(model, data.x[which])
    answer = spot.ask(LAYER, top=SHOWN, by=["label"], timeline=25, timeline_by="label")
    assert answer.hits is not None and answer.timeline is not None
    recalled = spot.by("label", layer=LAYER, score="abs")
    asked = []
    for i, ((title, row), index) in enumerate(zip(chosen.items(), which.tolist(), strict=True)):
        mask = f"label = {int(spot.prediction[i].argmax())}"
        without = memory.without(mask).predict(model, data.x[index : index + 1])[0]
        asked.append(
            DemoAnswer(
                title, row, data.images[index], int(data.labels[index]), i, spot.prediction[i], answer.hits,
                answer.groups["label"], recalled, answer.timeline, mask, without,
            )
        )  # fmt: skip
    return asked, spot.top(CURVE, layer=LAYER)


def tell(say: Console, asked: DemoAnswer) -> None:
    """One image on the terminal."""
    truth = "which is right" if asked.predicted == asked.label else f"but it is a {asked.label}"
    say.print(f"[bold]{asked.title}:[/] the network says {asked.predicted} ({_sure(asked.logits)}), {truth}.")
    say.print(hits_table(asked.hits[asked.query]))
    say.print(groups_table(asked.groups, asked.query))
    say.print(sum_check(asked.groups, asked.query))
    masked = int(asked.masked_logits.argmax())
    say.print(f"Without the visits where {asked.masked} it says {masked} ({_sure(asked.masked_logits)}). {MASKED}\n")


def save(out: Path, memory: Memory, data: DemoDigits, found: DemoFindings) -> Path:
    """Write the images (to go on asking), the figures, and the report."""
    np.savez(out / "train.npz", inputs=data.x.numpy(), labels=data.labels.numpy())
    np.savez(out / "test.npz", inputs=data.x[data.test].numpy(), labels=data.labels[data.test].numpy())
    for name, figure in draw(data, found).items():
        figure.savefig(out / name)
    facts = {
        "data": f"{len(data.train):,} MNIST digits, {len(data.test)} held out",
        "network": f"MLP {' – '.join(map(str, WIDTHS))}",
        "optimiser": "SGD with momentum 0.9, gradients clipped",
        "training": f"{memory.step} steps, {len(memory.visits):,} visits",
        "test accuracy": f"{found.accuracy:.1%}",
        "memory on disk": f"{size(disk_size(memory))}, slots in {memory.store.manifest.dtype}",
    }
    test = Examples(data.x[data.test], data.labels[data.test])
    desk = WorkDesk(patience=float("inf"))
    explorer = Explorer(memory, MLP(*WIDTHS), Examples(data.x, data.labels), test, desk=desk)
    rows = {ExamplePlace("test", each.row): each.title for each in found.asked}
    title = "Which training images is this prediction made of?"
    return write_report(out / "report.html", explorer, rows, title=title, facts=facts)


def draw(data: DemoDigits, found: DemoFindings) -> dict[str, Figure]:
    """The figures by their file names."""
    titles = [each.title.split(" (")[0] for each in found.asked]
    names = [
        f"{title}\nsays {each.predicted}, is {each.label}" for title, each in zip(titles, found.asked, strict=True)
    ]
    pictures = torch.stack([each.picture for each in found.asked])
    drawn = {"top.png": figures.top(found.asked[0].hits, data.images, asked=pictures, titles=names)}
    for each in found.asked:
        drawn[f"totals-{each.query}.png"] = figures.by(each.groups, query=each.query, recalled=each.recalled)
        drawn[f"timeline-{each.query}.png"] = figures.timeline(each.line, query=each.query)
    return drawn | {"spotlight.png": figures.spotlight(found.curve, titles=titles)}


def commands(out: Path) -> list[str]:
    """What to type next."""
    memory, model = out / "memory", f"dualform.models:MLP({', '.join(map(str, WIDTHS))})"
    return [
        f"dualform inspect {memory}",
        f"dualform ask {memory} --model '{model}' --data {out / 'test.npz'} --rows 0,1 --by label",
        f"dualform serve {memory} --model '{model}' --data {out / 'train.npz'} --test {out / 'test.npz'}",
    ]


def _sure(logits: Float[Tensor, " classes"]) -> str:
    return f"{logits.double().softmax(0).max():.1%} sure"
