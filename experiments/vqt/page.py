"""Generate docs/results/vqt.md from the stored results: every number on it comes from a result file of a run.

python -m experiments.vqt.page [--runs runs/vqt] [--restore]
"""

from collections.abc import Sequence
from typing import Any

from experiments.page import Page, gain, gain_over, helps, missing_of, sides, times_of
from experiments.results import DOCS, spread, table

from .cost import WAYS
from .results import ARCHIVE
from .settings import EXPERIMENTS, FROZEN, LEARNING, METHODS, NETWORKS, ONCE, SOURCE, TARGETS

PAGE = Page(DOCS / "results" / "vqt.md", "vqt", ARCHIVE)

DESCRIPTIONS = {
    "linear": "linear probe: a linear layer on the class token of the last layer",
    "linear-unit": "the same, with the class token scaled to length 1, as the feature blocks of the methods below are",
    "intermediate": "a linear layer on averages of four activations of every layer, as in Head2Toe",
    "intermediate-select": "the same, with a fifth of the features, selected by a group lasso",
    "vqt-1": "visual query tuning, one query token per layer",
    "vqt-5": "the same, with five query tokens per layer",
    "vqt-5-select": "the same, with a fifth of the features, selected by a group lasso; queries are kept, the head is trained again",
    "prompts": "visual prompt tuning: 8 learned tokens in every layer, and a linear layer",
    "lora": "LoRA of rank 4 on queries and values, and a linear layer",
    "vqt-5+prompts": "five query tokens per layer, on the backbone with prompts",
    "vqt-5+lora": "five query tokens per layer, on the backbone with LoRA",
    "full": "full fine-tuning",
}


def accuracies(target: str, method: str) -> list[float]:
    """Test accuracy of each network, in per cent."""
    return [100 * value for value in ARCHIVE.values(target, method, "training", "accuracy")]


def complete() -> list[str]:
    """The targets on which all linear probes were trained."""
    return [target for target in TARGETS if len(accuracies(target, "linear")) >= NETWORKS]


def answer() -> str:
    """Where visual query tuning is significantly better or worse than other methods."""
    targets, lines = complete(), []
    for method, bases in (
        ("vqt-5", ("linear", "linear-unit", "intermediate", "intermediate-select", "prompts", "lora", "full")),
        ("vqt-5+prompts", ("prompts",)),
        ("vqt-5+lora", ("lora", "full")),
    ):
        for base in bases:
            gains = {target: gain(accuracies(target, base), accuracies(target, method)) for target in targets}
            outcome = "; ".join(f"{side} on {', '.join(names)}" for side, names in sides(gains).items() if names)
            if outcome:
                lines.append(f"- `{method}` compared with `{base}`: {outcome}.")
    return helps(
        "Test accuracy after tuning with 1,000 labelled images. *Above* and *below*: the 95 % confidence interval of the mean paired difference over draws excludes zero:",
        lines,
        "This holds for a small backbone, trained on images of clothes, and three small tasks; nothing more is claimed.",
    )


def about_the_backbone() -> str:
    """The backbone, its training and its accuracy on the test images of the same data set."""
    trainings = ARCHIVE.values("backbone", SOURCE, "training")
    if not trainings:
        return ""
    training = trainings[0]
    return "\n\n".join([
        "## The backbone",
        f"A ViT of 6 layers, width 64, 4 heads, 64 patches and a class token ({training['parameters']:,} parameters), trained here from scratch on the 60,000 "
        f"images of Fashion-MNIST with {training['updates']:,} updates of batch size 64 (AdamW, one-cycle learning rate, flips). It classifies {100 * training['accuracy']:.1f} % of the 10,000 test images correctly. All "
        "images are 3 × 32 × 32: grey images are padded (the 8 × 8 digits are first enlarged four times) and repeated in three channels.",
    ])  # fmt: skip


def transfers() -> str:
    """Test accuracy of each method on each target."""
    targets = complete()
    if not targets:
        return ""
    rows = [
        [
            method,
            DESCRIPTIONS[method],
            *(spread(accuracies(target, method)) for target in targets),
            learned(targets, method),
        ]
        for method in METHODS
    ]
    return "\n\n".join([
        "## Transfer with 1,000 labelled images",
        f"Test accuracy in per cent, mean ± sample standard deviation over {NETWORKS} draws of the labelled images. Adam, 20 epochs with batches of 64, no augmentation, no weight decay; methods that select features train 20 epochs in each stage. The learning rate of a method on a target is "
        "chosen once, by accuracy on 200 of the first draw's 1,000 images after 10 epochs. A network is then trained on all 1,000 images and evaluated once on the test images, after the last update. *Learned*: the number of trained parameters, including the head.",
        table(["method", "what it is", *targets, "learned"], rows),
        verdict(targets),
        table(
            ["target", "tested on", *METHODS],
            [[target, f"{ARCHIVE.values(target, 'linear', 'training', 'tested_on')[0]:,}", *(rate(target, method) for method in METHODS)] for target in targets],
        ),
        "The last table shows the chosen learning rates: that of the head and the query tokens and, after the slash, that of the trained parameters inside the backbone. Methods that select features train these heads at half the rate. A star marks a rate at the edge of the grid. "
        f"The grid was {tried(FROZEN)} for a frozen backbone and {tried(LEARNING)} for a trained one.",
    ])  # fmt: skip


def tried(rates: Sequence[tuple[float, float]]) -> str:
    """Learning rates as text."""
    return ", ".join(" / ".join(f"{part:g}" for part in rate if part) for rate in rates)


def learned(targets: Sequence[str], method: str) -> str:
    """The number of parameters that a method trains."""
    counts = [count for target in targets for count in ARCHIVE.values(target, method, "training", "learned_parameters")]
    return f"{counts[0]:,}" if counts else "–"


def rate(target: str, method: str) -> str:
    """The chosen learning rate, with a star at the edge of the grid."""
    chosen = ARCHIVE.values(target, method, "training", "rate")
    if not chosen:
        return "–"
    grids = list(zip(*METHODS[method]["rates"], strict=True))
    return " / ".join(
        f"{part:g}" + ("\\*" if part in (min(grid), max(grid)) and len({*grid}) > 2 else "")
        for part, grid in zip(chosen[0], grids, strict=True)
        if part
    )


def verdict(targets: Sequence[str]) -> str:
    """Gains of visual query tuning over probes, intermediate features, fine-tuning, and prompts or LoRA alone."""
    lines = []
    ours = [method for method in METHODS if method.startswith("vqt")]
    for base, methods in {
        "linear": ["intermediate", "intermediate-select", *ours],
        "linear-unit": ours,
        "intermediate": ours,
        "full": ours,
        "prompts": ["vqt-5+prompts"],
        "lora": ["vqt-5+lora"],
    }.items():
        for method in methods:
            gains = [gain_over(accuracies(target, base), accuracies(target, method)) for target in targets]
            lines.append([base, method, *gains])
    text = (
        "Gain over a baseline in percentage points: mean paired difference over draws ± half-width of its 95 % confidence interval (Student's t); bold if the interval excludes zero. Draws from the 1,437 digits of scikit-learn "
        "share most of their images, so the intervals are too narrow there."
    )
    return f"{text}\n\n{table(['baseline', 'method', *targets], lines)}"


def costs() -> str:
    """Memory and time of an update at the shape of ViT-small."""
    measurements = ARCHIVE.values("cost", "vit-small", "cost", "methods")
    if not measurements:
        return ""
    methods = measurements[0]
    full = methods["full"]
    rows = [
        [name, f"{m['learned_parameters']:,}", *ratio(m, full, "kept_megabytes", 0), *ratio(m, full, "grown_megabytes", 0), *ratio(m, full, "forward_seconds", 2), *ratio(m, full, "backward_seconds", 2)]
        for name, m in methods.items() if name in WAYS
    ]  # fmt: skip
    head = ["method", "learned"]
    for quantity in ("kept, MB", "growth, MB", "forward, s", "backward, s"):
        head += [quantity, "of full"]
    return "\n\n".join([
        "## What an update costs at the shape of ViT-small",
        "12 layers, width 384, 6 heads, 197 tokens, 100 classes, random images, batches of 8, one thread. *Kept*: tensors that the forward pass saves, without parameters. *Growth*: the memory growth of a separate process in two updates "
        "with Adam, including gradients and optimiser state. *Of full*: the ratio to full fine-tuning. Times are medians; methods are interleaved. `released` runs queries and tokens as one sequence, as the released code does: it computes the same values but keeps the graph of the whole backbone.",
        table(head, rows),
        f"Ratio of peak memory growth to full fine-tuning: `vqt-1` {methods['vqt-1']['grown_megabytes'] / full['grown_megabytes']:.3f}, `vqt-10` {methods['vqt-10']['grown_megabytes'] / full['grown_megabytes']:.3f}, the released implementation with 10 tokens "
        f"{methods['vqt-10, released']['grown_megabytes'] / full['grown_megabytes']:.3f}.",
    ])  # fmt: skip


def ratio(method: dict[str, Any], base: dict[str, Any], key: str, digits: int) -> tuple[str, str]:
    """A value, and its ratio to that of full fine-tuning."""
    return f"{method[key]:,.{digits}f}", f"{method[key] / base[key]:.3f}"


def recorded() -> str:
    """Certificates, contributions and figures of recorded networks."""
    rows, figures = [], []
    for target in TARGETS:
        for training, explained in zip(
            ARCHIVE.values("recorded", target, "training"), ARCHIVE.values("recorded", target, "asked"), strict=False
        ):
            own, total = (sum(explained[key]) / len(explained[key]) for key in ("own_class", "total"))
            rows.append([target, f"{100 * training['accuracy']:.1f}", f"{training['visits']:,}", f"{training['memory_megabytes']:.0f}",
                         *(f"{training['certificate'][name]:.1e} ({training['floor'][name]:.1e})" for name in ("head.weight", "head.bias")),
                         training["marks"], f"{explained['off']:.0e}", f"{explained['residual']:.0e}", f"{own:+.0f}", f"{total - own:+.0f}"])  # fmt: skip
            image = ARCHIVE.images / f"recorded-{target}-asked.png"
            if image.exists():
                figures.append(
                    f"### {target}\n\n![Test images and the training images that contribute most to their logits, {target}](../images/vqt/{image.name})"
                )
    if not rows:
        return ""
    return "\n\n".join([
        "## Recorded and explained",
        "The backbone is frozen, so the head is the only trained linear layer. Its memory is small and complete: a logit is an exact sum over the visits of the transfer set and the initial weights of the head. Query tokens "
        "are trained too, but they are not attributed: the memory stores snapshots of them. The network is `vqt-5`, recorded in float32, trained with Adam at rate 0.01 for 20 epochs of 1,000 images. *Weights*, *biases*: the certificate and, in brackets, its rounding floor for training in float32. Biases begin at −4.6 and "
        "hardly change, so their relative error is high. *Difference*: the largest difference between the logits rebuilt from the memory and those of the network, on four test "
        "images. *Residual*: the logit minus the sum of its parts by class, relative to the logit. *Own class*: what training images of the predicted class add to its logit, mean over the four test images. *All else*: what all other images, biases and initial weights add.",
        table(["target", "accuracy, %", "visits", "memory, MB", "weights", "biases", "marks", "difference", "residual", "own class", "all else"], rows),
        "Each row of a figure shows, from left to right: a test image; where the query tokens of the last layer look (mean over tokens and heads); the training images that add most to its logit, summed over all their visits.",
        *figures,
    ])  # fmt: skip


HEAD = """# Visual query tuning

After Tu, Mai, Chao (2023), *Visual Query Tuning: Towards Effective Usage of Intermediate Representations for Parameter and Memory Efficient Transfer
Learning*, arXiv 2212.03220. This page is generated by `python -m experiments.vqt.page` from the run folders of

    dualform reproduce vqt

**Claim of the paper.** In each layer of a frozen vision transformer, a few learned query tokens summarise the intermediate features for a linear head.
This works better than other uses of intermediate features, in many cases better than fine-tuning, and needs little memory, since no gradients have to be
propagated through the backbone.

## Where we differ

1. We did not have the paper's benchmark (VTAB-1k: 19 tasks) and its checkpoints (ImageNet, MAE). A small backbone is trained here on Fashion-MNIST and
   tuned on 1,000 images each of MNIST, CIFAR-10 and scikit-learn's 8 × 8 digits. No number of the paper can be compared with ours, and none is quoted.
2. We did not have the paper's text either: the method follows a specification written from its abstract and released code. The released code keeps
   the graph of the whole backbone and ours does not; both are measured.
3. We train 20 epochs with batches of 64 instead of 100 with batches of 128, the first epoch at half the rate. We try five or eight learning rates instead of 20 settings,
   without weight decay and without dropout of queries; where features are selected, a fifth is kept. There are three draws of the labelled images instead of five seeds.
4. The head on features of all layers follows the idea of Head2Toe, not its code: four activations per layer, averaged over tokens."""


def main() -> None:
    """Collect the results and write the page, or restore run folders."""
    PAGE.main(
        HEAD,
        [
            lambda: missing_of(ARCHIVE, EXPERIMENTS, lambda name: 1 if name in ONCE else NETWORKS),
            answer,
            about_the_backbone,
            transfers,
            costs,
            recorded,
            lambda: times_of(ARCHIVE, EXPERIMENTS, "vqt"),
        ],
    )


if __name__ == "__main__":
    main()
