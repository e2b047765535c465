"""Write docs/results/dual-form.md from the run folders. Every number on the page comes from one of their files.

python -m experiments.dual_form.page [--runs runs/dual-form]

The script first copies settings, numbers and figures (never memories) to experiments/dual_form/results and builds the
page from these copies, so the page can be rebuilt without the runs.
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
"""The paper's values: mean and standard deviation over five networks, in per cent."""

PRINTED_AS_ZERO = 0.3
"""Standard deviation assumed for the cell that the paper prints as 0.0, so that two deviations are 0.6."""

WITHIN = 2.0
"""Percentage points from the paper's accuracy that count as agreement."""

ACCURACY = {
    ("single", 0, "mnist"): 97, ("joint", 0, "mnist"): 97, ("joint", 0, "fashion-mnist"): 87,
    ("continual", 0, "mnist"): 97, ("continual", 1, "mnist"): 45, ("continual", 1, "fashion-mnist"): 85,
}  # fmt: skip
"""The paper's accuracies in per cent, by experiment, phase and data set."""


def cell(variant: str, layer: str, row: str, score: str = "abs") -> list[float]:
    """One cell of Table 1 for each network."""
    return [seed["votes"]["layers"][layer][score][row] for seed in seeds("single", variant, "votes")]


def distance(variant: str, layer: str, row: str) -> float:
    """Distance of our mean from the paper's, in the paper's standard deviations."""
    mean, deviation = TABLE1[layer, row]
    return abs(statistics.mean(cell(variant, layer, row)) - mean) / (deviation or PRINTED_AS_ZERO)


def fit(variant: str) -> float:
    """Root mean square distance over all cells."""
    return math.sqrt(statistics.mean(distance(variant, *place) ** 2 for place in TABLE1))


# ------------------------------------------------------------------------------------------- parts of the page


def table_one() -> str:
    """Table 1 for all variants."""
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
        else f"Which variant fits best is open until there are {NETWORKS['single']} networks of each."
    )
    votes = [seed["votes"] for v in variants for seed in seeds("single", v, "votes")]
    seconds = [
        seed["votes"]["seconds"] + seed["training"]["seconds"] for v in variants for seed in seeds("single", v, "votes")
    ]
    slots = sorted({layer["slots"] for vote in votes for layer in vote["layers"].values()})
    return "\n\n".join([
        "## Table 1: voting by total attention",
        "Each test image votes for the class whose visits have the largest Σ|α| over all slots. *Target*: the vote is the true class. *Output*: the vote "
        "is the network's prediction. Shares are in per cent of the test images that the network gets wrong, or right (where target and output "
        "coincide). (!) marks a mean that differs from the paper's by more than two of the paper's standard deviations (for the cell "
        f"printed as 0.0: by more than {2 * PRINTED_AS_ZERO:g}).",
        table(["layer", "", "paper", *variants], rows),
        table(
            ["", *variants],
            [
                ["networks", *(len(seeds("single", v, "votes")) for v in variants)],
                ["cells within two standard deviations", *(f"{within[v]} of {len(TABLE1)}" for v in variants)],
                ["root mean square distance, in standard deviations", *(f"{fits[v]:.2f}" for v in variants)],
            ],
        ),
        f"{verdict} Networks: {counts}. Every total covers all {' or '.join(f'{n:,}' for n in slots)} "
        f"slots of a layer and {votes[0]['test_images']:,} test images. Training, recording and counting took "
        f"{min(seconds):.0f} to {max(seconds):.0f} s per network, {sum(seconds) / 60:.0f} minutes in all; the process used at most "
        f"{max(vote['peak_megabytes'] for vote in votes):,} MB of memory, including pages of memory-mapped files.",
    ])  # fmt: skip


def accuracies() -> str:
    """Our accuracies next to the paper's."""
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
    head = ["experiment", "variant", "after phase", "test set", "paper, %", "ours, %", "networks", "steps clipped, %", "certificate"]  # fmt: skip
    note = "The certificate is that of the worst parameter. Memories are stored in float16, those of `continual` in float32."
    return "\n\n".join(["## Accuracies", table(head, rows), note, fits()]) if rows else ""


def fits() -> str:
    """Largest distance of each clipping variant from the paper's accuracies."""
    rows = []
    for experiment in ("single", "joint", "continual"):
        for variant in EXPERIMENTS[experiment]:
            runs = seeds(experiment, variant, "training")
            distances = {
                f"{name} after phase {phase + 1}": statistics.mean(
                    100 * run["training"]["accuracy"][phase][name] for run in runs
                )
                - paper
                for (which, phase, name), paper in ACCURACY.items()
                if which == experiment and runs
            }
            if distances:
                worst = max(distances, key=lambda place: abs(distances[place]))
                verdict = "yes" if abs(distances[worst]) <= WITHIN else "no"
                rows.append([experiment, variant, f"{distances[worst]:+.1f} ({worst})", verdict])
    head = ["experiment", "variant", "largest distance from the paper, percentage points", f"all within {WITHIN:g}"]
    text = (
        "Neither clipping variant is closest everywhere. Table 1 is closer with clipping. The accuracies after two tasks "
        "are closer without it, except for Fashion-MNIST at the end of the two tasks, which is closer with it. The paper's "
        "accuracies are whole numbers without a spread, and no source says which settings produced them."
    )
    return "\n\n".join([table(head, rows), text])


def times() -> str:
    """Time and peak memory of each experiment."""
    rows = []
    for experiment in EXPERIMENTS:
        for variant in EXPERIMENTS[experiment] | ON_REQUEST.get(experiment, {}):
            runs = seeds(experiment, variant, "training")
            stages = [
                [json.loads(file.read_text()) for file in run.folder.glob("*.json") if file.name != "run.json"]
                for run in runs
            ]
            if runs:
                minutes = [sum(stage["seconds"] for stage in run_stages) / 60 for run_stages in stages]
                peak = max(stage["peak_megabytes"] for run_stages in stages for stage in run_stages)
                command = f"`dualform reproduce dual-form/{experiment} --variant {variant}`"
                rows.append([command, len(runs), f"{min(minutes):.0f} to {max(minutes):.0f}", f"{peak:,}"])
    text = (
        "Minutes include training and all queries, on two cores that were often busy with other work as well; figures are drawn for "
        "the first network only. Peak memory of the process includes the mapped pages of its memory files, "
        "which the operating system reclaims when it needs them."
    )
    head = ["command", "networks", "minutes per network", "peak memory, MB"]
    return "\n\n".join(["## Commands and times", table(head, rows), text]) if rows else ""


def signed() -> str:
    """Votes by other scores, and the controls."""
    parts = []
    for variant in EXPERIMENTS["single"]:
        runs = seeds("single", variant, "votes")
        if not runs:
            continue
        rows = []
        for layer, scores in runs[0]["votes"]["layers"].items():
            shared = set(scores).intersection(*(run["votes"]["layers"][layer] for run in runs))
            for score in (name for name, value in scores.items() if isinstance(value, dict) and name in shared):
                shares = [
                    spread(cell(variant, layer, row, score)) for row in ("target, wrong", "output, wrong", "right")
                ]
                rows.append([layer, score, *shares])
        residual = max(layer["residual"] for run in runs for layer in run["votes"]["layers"].values())
        parts.append(f"### {variant}\n\n{table(['layer', 'vote by', 'target, wrong', 'output, wrong', 'right'], rows)}\n\n"
                     f"Contributions and the other parts of a layer's output add up to that output within {residual:.0e}.")  # fmt: skip
    if not parts:
        return ""
    text = (
        "*abs* is the paper's score. *a visit* divides the total by the number of visits of the class. *weight* is Σα: a classifier by the sum of "
        "the inputs of each class, which after a ReLU (layers 1 and 2) equals Σ|α|. *untrained network* is the same "
        "classifier before the first step: it shows what input similarity alone can tell. Layer 0 sees the pixels themselves, so its "
        "votes by *weight* are the raw-pixel control. *contribution to the answer* is what "
        "the visits of each class add to the logit of the predicted class, to first order through the layers above, and exactly in "
        "layer 2."
    )
    return "\n\n".join(["## Signed, error-weighted contributions, and controls", text, *parts])


def masks() -> str:
    """Accuracies with one of two phases masked."""
    parts = []
    for experiment in ("continual", "continual-long"):
        for variant in EXPERIMENTS[experiment]:
            runs = seeds(experiment, variant, "masks")
            if not runs:
                continue
            names = list(runs[0]["masks"]["accuracy"])
            sets = list(runs[0]["masks"]["accuracy"][names[0]])
            rows = [
                [name, *(spread([100 * run["masks"]["accuracy"][name][data_set] for run in runs]) for data_set in sets)]
                for name in names
            ]
            switch = [run["masks"]["switch"] for run in runs]
            changed, images = sum(s["predictions changed"] for s in switch), sum(s["images"] for s in switch)
            difference = max(s["largest logit difference"] for s in switch)
            parts.append("\n\n".join([
                f"### {experiment}, {variant}",
                table(["", *(f"{data_set}, %" for data_set in sets)], rows),
                f"Read with the coefficients of the switch, the memory differs from the checkpoint saved at that step in {changed} of {images:,} "
                f"predictions (largest logit difference {difference:.1e}).",
            ]))  # fmt: skip
    text = (
        "The paper says that masking the second task *would* recover the first. For the row *first phase, coefficients of the "
        "switch*, the memory is read as of the step at which the task changes. All other rows are read at the end of training, when the momentum of the first phase "
        "has died out. A mask removes direct contributions and holds everything else fixed."
    )
    return "\n\n".join(["## Masking one of two tasks", text, *parts]) if parts else ""


def kept() -> str:
    """Accuracy with only some of the visits, and without those of one class."""
    parts = []
    for variant in EXPERIMENTS["kept"]:
        tables = []
        for run in seeds("kept", variant, "kept")[:1]:
            summary = run["kept"]
            orders = list(summary["accuracy"])
            carried = summary["share of all sizes in the largest"]
            rows = [
                [f"{100 * share:g}", *(f"{100 * summary['accuracy'][order][i]:.1f}" for order in orders), f"{100 * carried[str(share)]:.0f}"]
                for i, share in enumerate(summary["shares"])
            ]  # fmt: skip
            tables.append(table(["visits kept, %", *orders, "share of total size in the largest, %"], rows))
        for run in seeds("kept", variant, "classes")[:1]:
            lines = run["classes"]["classes"]
            rows = [
                [f"{100 * value:.1f}" if isinstance(value, float) else value for value in line.values()]
                for line in lines
            ]
            head = [
                "class masked",
                "predictions of this class, %",
                "accuracy on this class, %",
                "accuracy on the others, %",
            ]
            tables.append(table(head, rows))
        if tables:
            parts += [f"### {variant}", *tables]
    text = (
        "The first table gives the accuracy when only some of the visits are added to the initial weights: those with the largest size "
        "(Σ|c|·‖e‖·‖x‖ in each layer, relative to how far the layer moved), the latest, the earliest, or a random "
        "selection. The second table removes all visits of one class."
    )
    return "\n\n".join(["## Keeping some visits, removing a class", text, *parts]) if parts else ""


def forgetting() -> str:
    """Which visits changed a correct prediction into a wrong one."""
    parts = []
    for variant in EXPERIMENTS["continual"]:
        for run in seeds("continual", variant, "forgetting")[:1]:
            summary = run["forgetting"]
            rows = [
                [layer, f"{margin['initial']:+.2f}", f"{margin['phases']['1']:+.2f}", f"{margin['phases']['2']:+.2f}", f"{margin['whole']:+.2f}",
                 f"{margin['second task, class of the wrong answer']:+.2f}"]
                for layer, margin in summary["layers"].items()
            ]  # fmt: skip
            head = ["layer", "initial weights", "first task", "second task", "total of the layer", "second task, visits labelled with the predicted class"]  # fmt: skip
            parts.append(
                f"### {variant}\n\n{summary['lost']:,} of {summary['images']:,} images of the first task were classified correctly at the switch "
                f"and are misclassified at the end. The table splits their mean margin, the logit of the true class minus that of the predicted class:\n\n"
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
                training, used = run["training"], run["run"]["settings"]
                score = (
                    f"{training['perplexity']:.1f} perplexity"
                    if used["text"] == "wikitext-2"
                    else f"{training['bits']:.2f} bits per character"
                )
                rows.append([
                    experiment, variant, f"{used['hidden']} units, {used['updates']:,} updates of {used['batch']} × {used['unroll']} tokens",
                    f"{training['vocabulary']:,}", score, f"{training['worst']:.1e}", f"{training['seconds'] / 60:.0f}",
                ])  # fmt: skip
    if not rows:
        return ""
    text = (
        "The paper's code trains these models with Adam, for which its identity does not hold: no single scalar per step explains the "
        "weight change. With Adam's own rule the weights are explained exactly, slot by slot. For the output layer of "
        "WikiText-2, whose errors have 33,278 components each, the memory keeps only keys and a ledger. The top training passages for a set of prompts, in all "
        "layers, ranked by slot, by place in the text and by contribution, are on a separate page: [passages](dual-form-passages.md)."
    )
    head = [
        "experiment",
        "variant",
        "network",
        "vocabulary",
        "test score",
        "worst certificate",
        "training time, minutes",
    ]
    return "\n\n".join(["## Language models", text, table(head, rows)])


def figures() -> str:
    """The figures, by experiment and variant."""
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

Irie, Csordás, Schmidhuber (2022), arXiv 2202.05798. `python -m experiments.dual_form.page` writes this page from the
run folders of

    dualform reproduce dual-form

**Claim.** A linear layer trained by gradient descent is equivalent to attention over its training inputs. The attention of a test
image to the training images, summed by class, carries information about the network's prediction, more so in deeper layers; after
training on two tasks in sequence, the attention crosses task boundaries.

## Where we differ

1. The paper states 3,000 updates for the single task, its code uses 5,000. The code clips gradients at 1.0 by default,
   and no source says whether the paper's runs did. We run all four combinations.
2. The paper's code stores inputs and error norms. We store inputs and errors (float16 with a power-of-two scale for
   each error), so contributions are signed and sum to the output, and every run has a certificate.
3. Batch order and initial weights follow our seeds; the paper's are not fixed.
4. In the paper's continual runs, about two batches right after the switch come from the first task but are noted as
   belonging to the second. Here they are noted under the task they come from.
5. The test image in each figure is the first of its kind in the test set; we do not know which one the paper shows.
6. CIFAR-10 runs on the 10,000 training and 2,000 test images available here; the paper's split keeps 7,992 of the former.
7. The language models are smaller (variant `cpu`; the table gives the sizes). The paper's sizes run with `--variant paper`. Texts
   are cut into streams at fixed places, and prompts are spaced evenly over the texts; except for its Table 2, we do not
   know which prompts the paper shows."""


def write(parts: Sequence[Callable[[], str]]) -> None:
    """Write the results page and the page of passages."""
    machines = sorted({json.loads(file.read_text())["machine"] for file in results.RESULTS.rglob("run.json")})
    end = f"Machine: {'; '.join(machines)}." if machines else ""
    PAGE.write_text("\n\n".join([HEAD, *(text for part in parts if (text := part())), end]) + "\n")
    if passage_text := passages():
        PAGE.with_name(f"{PAGE.stem}-passages.md").write_text(f"{PASSAGES}\n\n{passage_text}\n")


def main() -> None:
    """Collect results and write the page."""
    options = argparse.ArgumentParser()
    options.add_argument("--runs", type=Path, default=Path("runs/dual-form"))
    collect(options.parse_args().runs)
    write([table_one, accuracies, signed, masks, kept, forgetting, language, times, figures])
    print(PAGE)


if __name__ == "__main__":
    main()
