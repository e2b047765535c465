"""docs/results/dual-form.md, made of the run folders: every number on it stands in one of their files.

python -m experiments.dual_form.page [--runs runs/dual-form]

Results are first copied to experiments/dual_form/results (settings, numbers and figures; never memories), and the page
is made of those, so it can be made again without the runs.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.results import DOCS, spread, table

from . import results
from .passages import PASSAGES, passages
from .results import collect, seeds
from .settings import EXPERIMENTS, NETWORKS, ON_REQUEST, LanguageSettings

PAGE = DOCS / "results" / "dual-form.md"

TABLE1 = {
    ("0", "target, wrong"): (17.2, 2.7), ("0", "output, wrong"): (49.5, 1.5), ("0", "right"): (75.1, 0.0),
    ("1", "target, wrong"): (18.0, 2.9), ("1", "output, wrong"): (52.9, 2.9), ("1", "right"): (78.8, 0.8),
    ("2", "target, wrong"): (20.6, 2.6), ("2", "output, wrong"): (60.1, 4.5), ("2", "right"): (84.7, 1.1),
}  # fmt: skip
"""Of the paper: mean and deviation over five networks, in per cent."""

PRINTED_AS_ZERO = 0.3
"""The deviation of a cell that is printed as 0.0 counts as this much: within two of it are 0.6."""

WITHIN = 2.0
"""Points from the paper's accuracy that count as the same."""

ACCURACY = {
    ("single", 0, "mnist"): 97, ("joint", 0, "mnist"): 97, ("joint", 0, "fashion-mnist"): 87,
    ("continual", 0, "mnist"): 97, ("continual", 1, "mnist"): 45, ("continual", 1, "fashion-mnist"): 85,
}  # fmt: skip
"""Of the paper, by experiment, phase and data set, in per cent."""


def cell(variant: str, layer: str, row: str, score: str = "abs") -> list[float]:
    """A cell of Table 1 in every network."""
    return [seed["votes"]["layers"][layer][score][row] for seed in seeds("single", variant, "votes")]


def distance(variant: str, layer: str, row: str) -> float:
    """How many of the paper's deviations a mean is off."""
    mean, deviation = TABLE1[layer, row]
    return abs(statistics.mean(cell(variant, layer, row)) - mean) / (deviation or PRINTED_AS_ZERO)


def fit(variant: str) -> float:
    """The root of the mean squared distance of all cells."""
    return math.sqrt(statistics.mean(distance(variant, *place) ** 2 for place in TABLE1))


# ------------------------------------------------------------------------------------------- parts of the page


def table_one() -> str:
    """Table 1, in all variants."""
    variants = [variant for variant in EXPERIMENTS["single"] if seeds("single", variant, "votes")]
    if not variants:
        return ""
    rows = []
    for layer, row in TABLE1:
        mean, deviation = TABLE1[layer, row]
        ours = [f"{spread(cell(v, layer, row))}{'' if distance(v, layer, row) <= 2 else ' (!)'}" for v in variants]
        rows.append([layer, row, f"{mean} ± {deviation}", *ours])
    counts = ", ".join(f"{v}: {len(seeds('single', v, 'votes'))}" for v in variants)
    fits = {v: fit(v) for v in variants}
    within = {v: sum(distance(v, *place) <= 2 for place in TABLE1) for v in variants}
    best = min(fits, key=fits.__getitem__)
    complete = min(len(seeds("single", v, "votes")) for v in EXPERIMENTS["single"]) >= NETWORKS["single"]
    verdict = (
        f"**{best}** fits the paper best."
        if complete
        else f"Which fits best is open until there are {NETWORKS['single']} networks of each."
    )
    about = [seed["votes"] for v in variants for seed in seeds("single", v, "votes")]
    time = [
        a["seconds"] + s["training"]["seconds"]
        for v in variants
        for s in seeds("single", v, "votes")
        for a in [s["votes"]]
    ]
    slots = sorted({layer["slots"] for a in about for layer in a["layers"].values()})
    return "\n\n".join([
        "## Table 1: the vote of the totals",
        "A vote is the class whose visits have the largest Σ|α| over all slots. *Target*: it is the true class; *output*: "
        "it is the network's answer; in per cent of the test images that the network gets wrong, or right (where the two "
        "are the same). (!) marks a mean that is more than two of the paper's deviations from the paper's (the cell "
        f"printed as 0.0: more than {2 * PRINTED_AS_ZERO:g}).",
        table(["layer", "", "paper", *variants], rows),
        table(
            ["", *variants],
            [
                ["networks", *(len(seeds("single", v, "votes")) for v in variants)],
                ["cells within two deviations", *(f"{within[v]} of {len(TABLE1)}" for v in variants)],
                ["root mean square of the distances, in deviations", *(f"{fits[v]:.2f}" for v in variants)],
            ],
        ),
        f"{verdict} Networks: {counts}. Every total is over all {' or '.join(f'{n:,}' for n in slots)} "
        f"slots of a layer and {about[0]['test_images']:,} test images. Training, recording and counting took "
        f"{min(time):.0f} to {max(time):.0f} s a network, {sum(time) / 60:.0f} minutes in all; the process took at most "
        f"{max(a['peak_megabytes'] for a in about):,} MB, pages of mapped files included.",
    ])  # fmt: skip


def accuracies() -> str:
    """Accuracies beside the paper's."""
    rows = []
    for experiment, variant in [(e, v) for e in EXPERIMENTS for v in EXPERIMENTS[e] if e not in ON_REQUEST]:
        if runs := seeds(experiment, variant, "training"):
            for phase in range(len(runs[0]["training"]["accuracy"])):
                for name in runs[0]["training"]["accuracy"][phase]:
                    paper = ACCURACY.get((experiment, phase, name))
                    ours = [100 * run["training"]["accuracy"][phase][name] for run in runs]
                    rows.append([
                        experiment, variant, phase + 1, name, "–" if paper is None else paper, spread(ours), len(runs),
                        spread([100 * run["training"]["clipped"] for run in runs], 0),
                        f"{max(run['training']['certificate'] for run in runs):.1e}",
                    ])  # fmt: skip
    head = ["experiment", "variant", "after phase", "test images of", "paper, %", "ours, %", "networks", "steps clipped, %", "certificate"]  # fmt: skip
    note = "The certificate is the worst of all parameters; memories are in float16, those of `continual` in float32."
    return "\n\n".join(["## Accuracies", table(head, rows), note, fits()]) if rows else ""


def fits() -> str:
    """How far each way of clipping is from the paper's accuracies."""
    rows = []
    for experiment in ("single", "joint", "continual"):
        for variant in EXPERIMENTS[experiment]:
            runs = seeds(experiment, variant, "training")
            far = {
                f"{name} after phase {phase + 1}": statistics.mean(
                    100 * run["training"]["accuracy"][phase][name] for run in runs
                )
                - paper
                for (which, phase, name), paper in ACCURACY.items()
                if which == experiment and runs
            }
            if far:
                worst = max(far, key=lambda place: abs(far[place]))
                fine = "yes" if abs(far[worst]) <= WITHIN else "no"
                rows.append([experiment, variant, f"{far[worst]:+.1f} ({worst})", fine])
    head = ["experiment", "variant", "largest distance from the paper, points", f"all within {WITHIN:g}"]
    text = (
        "No one way of clipping is closest everywhere: Table 1 is closer with clipping, the accuracies after two tasks "
        "are closer without it, but for Fashion-MNIST at the end of the two tasks, which is closer with it. The paper's "
        "accuracies are whole numbers without a spread, and the sources do not say which settings gave them."
    )
    return "\n\n".join([table(head, rows), text])


def times() -> str:
    """How long each experiment took, and what it needed."""
    rows = []
    for experiment in EXPERIMENTS:
        for variant in EXPERIMENTS[experiment] | ON_REQUEST.get(experiment, {}):
            runs = seeds(experiment, variant, "training")
            stages = [
                [json.loads(file.read_text()) for file in run.folder.glob("*.json") if file.name != "run.json"]
                for run in runs
            ]
            if runs:
                minutes = [sum(stage["seconds"] for stage in each) / 60 for each in stages]
                peak = max(stage["peak_megabytes"] for each in stages for stage in each)
                command = f"`dualform reproduce dual-form/{experiment} --variant {variant}`"
                rows.append([command, len(runs), f"{min(minutes):.0f} to {max(minutes):.0f}", f"{peak:,}"])
    text = (
        "Minutes a network with all its questions, on two cores that often did something else as well; figures are drawn of "
        "the first network alone. The most memory of the process counts the pages of its memory's files that are mapped, "
        "which the system takes back when it needs them."
    )
    head = ["command", "networks", "minutes each", "most memory, MB"]
    return "\n\n".join(["## Commands and times", table(head, rows), text]) if rows else ""


def signed() -> str:
    """Other scores, and the controls."""
    parts = []
    for variant in EXPERIMENTS["single"]:
        runs = seeds("single", variant, "votes")
        if not runs:
            continue
        rows = []
        for layer, scores in runs[0]["votes"]["layers"].items():
            everywhere = set(scores).intersection(*(run["votes"]["layers"][layer] for run in runs))
            for score in (name for name, value in scores.items() if isinstance(value, dict) and name in everywhere):
                shares = [
                    spread(cell(variant, layer, row, score)) for row in ("target, wrong", "output, wrong", "right")
                ]
                rows.append([layer, score, *shares])
        residual = max(a["residual"] for run in runs for a in run["votes"]["layers"].values())
        parts.append(f"### {variant}\n\n{table(['layer', 'vote by', 'target, wrong', 'output, wrong', 'right'], rows)}\n\n"
                     f"Contributions and the other parts of a layer's output sum to it within {residual:.0e}.")  # fmt: skip
    if not parts:
        return ""
    text = (
        "*abs* is the paper's score; *a visit* divides by how often a class came. *weight* is Σα: a classifier by the sum of "
        "the inputs of each class, which behind a ReLU (layers 1 and 2) is the same as Σ|α|. *untrained network* is that "
        "classifier before the first step: what similarity of the inputs alone tells. Layer 0 sees the pixels themselves, so its "
        "votes by *weight* are the control by raw pixels. *contribution to the answer* is what "
        "the visits of each class add to the logit that the network chose, first order through the layers above: exact in "
        "layer 2."
    )
    return "\n\n".join(["## Signed, error-weighted contributions, and controls", text, *parts])


def masks() -> str:
    """Masks of phases."""
    parts = []
    for experiment in ("continual", "continual-long"):
        for variant in EXPERIMENTS[experiment]:
            runs = seeds(experiment, variant, "masks")
            if not runs:
                continue
            names = list(runs[0]["masks"]["accuracy"])
            sets = list(runs[0]["masks"]["accuracy"][names[0]])
            rows = [
                [name, *(spread([100 * run["masks"]["accuracy"][name][each] for run in runs]) for each in sets)]
                for name in names
            ]
            switch = [run["masks"]["switch"] for run in runs]
            changed, images = sum(s["predictions changed"] for s in switch), sum(s["images"] for s in switch)
            off = max(s["largest logit difference"] for s in switch)
            parts.append("\n\n".join([
                f"### {experiment}, {variant}",
                table(["", *(f"{each}, %" for each in sets)], rows),
                f"With the coefficients of the switch the memory changes {changed} of {images:,} predictions of the "
                f"checkpoint that was taken there (largest difference of a logit {off:.1e}).",
            ]))  # fmt: skip
    text = (
        "The paper says that a mask over the second task *would* give the first one back. *With the coefficients of the "
        "switch* the memory is read at that step; all other lines are read at the end, where the momentum of the first phase "
        "has run out. A mask takes away direct contributions with everything else held fixed."
    )
    return "\n\n".join(["## The mask that the paper imagined", text, *parts]) if parts else ""


def kept() -> str:
    """What is left when only some visits are kept, and without a class."""
    parts = []
    for variant in EXPERIMENTS["kept"]:
        tables = []
        for run in seeds("kept", variant, "kept")[:1]:
            about = run["kept"]
            orders = list(about["accuracy"])
            carried = about["share of all sizes in the largest"]
            rows = [
                [f"{100 * share:g}", *(f"{100 * about['accuracy'][order][i]:.1f}" for order in orders), f"{100 * carried[str(share)]:.0f}"]
                for i, share in enumerate(about["shares"])
            ]  # fmt: skip
            tables.append(table(["visits kept, %", *orders, "of all sizes in the largest, %"], rows))
        for run in seeds("kept", variant, "classes")[:1]:
            lines = run["classes"]["classes"]
            rows = [
                [f"{100 * value:.1f}" if isinstance(value, float) else value for value in line.values()]
                for line in lines
            ]
            head = ["class masked", "answers of this class, %", "right in this class, %", "right in the others, %"]
            tables.append(table(head, rows))
        if tables:
            parts += [f"### {variant}", *tables]
    text = (
        "Accuracy with some of the visits alone, beside the first weights: those that put the most into the weights "
        "(Σ|c|·‖e‖·‖x‖ of each layer, relative to how far the layer moved), the latest, the earliest, or random "
        "ones. And without all visits of one class."
    )
    return "\n\n".join(["## What is left of a network", text, *parts]) if parts else ""


def forgetting() -> str:
    """Which visits took an answer away."""
    parts = []
    for variant in EXPERIMENTS["continual"]:
        for run in seeds("continual", variant, "forgetting")[:1]:
            about = run["forgetting"]
            rows = [
                [layer, f"{a['initial']:+.2f}", f"{a['phases']['1']:+.2f}", f"{a['phases']['2']:+.2f}", f"{a['whole']:+.2f}",
                 f"{a['second task, class of the wrong answer']:+.2f}"]
                for layer, a in about["layers"].items()
            ]  # fmt: skip
            head = ["layer", "first weights", "first task", "second task", "the layer's whole part", "second task, visits labelled as the wrong answer"]  # fmt: skip
            parts.append(
                f"### {variant}\n\n{about['lost']:,} of {about['images']:,} images of the first task were right at the switch "
                f"and are wrong at the end. Their mean margin, logit of the right class less that of the answer:\n\n"
                f"{table(head, rows)}"
            )
    return "\n\n".join(["## Forgetting, explained", *parts]) if parts else ""


def language() -> str:
    """The language models."""
    rows = []
    for experiment in ON_REQUEST:
        for variant, settings in (EXPERIMENTS[experiment] | ON_REQUEST[experiment]).items():
            assert isinstance(settings, LanguageSettings)
            for run in seeds(experiment, variant, "training"):
                about, asked = run["training"], run["run"]["settings"]
                score = (
                    f"{about['perplexity']:.1f} perplexity"
                    if asked["text"] == "wikitext-2"
                    else f"{about['bits']:.2f} bits a character"
                )
                rows.append([
                    experiment, variant, f"{asked['hidden']} units, {asked['updates']:,} updates of {asked['batch']} × {asked['unroll']} tokens",
                    f"{about['vocabulary']:,}", score, f"{about['worst']:.1e}", f"{about['seconds'] / 60:.0f}",
                ])  # fmt: skip
    if not rows:
        return ""
    text = (
        "The paper's code trains them with Adam, for which its identity does not hold: no scalar for each step explains the "
        "change of the weights. With the rule of Adam they are explained exactly, slot by slot; of the output layer of "
        "WikiText-2, whose errors have 33,278 numbers each, keys and a ledger are kept. Top passages for prompts, in all "
        "layers, by slot, by place of the text and by contribution: [passages](dual-form-passages.md)."
    )
    head = ["experiment", "variant", "network", "vocabulary", "test text", "certificate, worst", "training, minutes"]
    return "\n\n".join(["## Language models", text, table(head, rows)])


def figures() -> str:
    """What was drawn."""
    titles = {
        "single": "Figures 4 and 5: a 6", "joint": "Figures 6 and 7: an ankle boot of the second task",
        "continual": "Figures 8 and 9: a 1 that is misread after the second task", "cifar10": "CIFAR-10: a frog",
    }  # fmt: skip
    parts = []
    for experiment, title in titles.items():
        for variant in EXPERIMENTS[experiment]:
            for name, text in (("classes-abs", "by |α|"), ("closest-abs", "the closest training images"), ("classes-contribution", "by contribution")):  # fmt: skip
                file = results.IMAGES / f"{experiment}-{variant}-{name}.png"
                if file.exists():
                    parts.append(
                        f"### {title}, {variant}: {text}\n\n![{title}, {text}](../images/dual-form/{file.name})"
                    )
    return "\n\n".join(["## Figures", *parts]) if parts else ""


HEAD = """# The dual form of neural networks, reproduced

Irie, Csordás, Schmidhuber (2022), arXiv 2202.05798. This page is made by `python -m experiments.dual_form.page` from the
run folders of

    dualform reproduce dual-form

**Claim.** A linear layer trained by gradient descent is attention over its training. The attention that a test image
pays to the training images, summed by class, says something about the network's answer, more so in deeper layers; after
two tasks one after the other it crosses tasks.

## Where we differ

1. The paper says 3,000 updates for the single task, its code 5,000; the code clips gradients at 1.0 unless told
   otherwise, and nothing tells whether it was. All four are run.
2. The paper's code keeps inputs and norms of errors. Here inputs and errors are kept (float16 with a power of two for
   each error), so contributions are signed and sum to the output, and every run has a certificate.
3. The order of the batches and the first weights are those of our seeds; the paper's are not fixed.
4. In the paper's continual runs about two batches right after the switch are of the first task but noted as of the
   second; here they are noted as what they are.
5. The test image of a figure is the first of its kind in the test set; which one the paper shows is not known.
6. CIFAR-10 is run on the 10,000 training and 2,000 test images at hand, of which the paper's split keeps 7,992.
7. The language models are smaller (`cpu`, the table says how); the paper's sizes run with `--variant paper`. Texts are cut
   into streams at fixed places, and prompts are taken evenly over the texts; which ones the paper shows is not known but
   for its Table 2."""


def write(parts: Sequence[Callable[[], str]]) -> None:
    """Make the page."""
    machines = sorted({json.loads(file.read_text())["machine"] for file in results.RESULTS.rglob("run.json")})
    end = f"Machine: {'; '.join(machines)}." if machines else ""
    PAGE.write_text("\n\n".join([HEAD, *(text for part in parts if (text := part())), end]) + "\n")
    if found := passages():
        PAGE.with_name(f"{PAGE.stem}-passages.md").write_text(f"{PASSAGES}\n\n{found}\n")


def main() -> None:
    """Collect results and write the page."""
    options = argparse.ArgumentParser()
    options.add_argument("--runs", type=Path, default=Path("runs/dual-form"))
    collect(options.parse_args().runs)
    write([table_one, accuracies, signed, masks, kept, forgetting, language, times, figures])
    print(PAGE)


if __name__ == "__main__":
    main()
