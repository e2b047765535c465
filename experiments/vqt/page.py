"""docs/results/vqt.md, made of what is kept of the runs: every number on it stands in one of their files.

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

TOLD = {
    "linear": "linear probe: a linear layer on the last class token",
    "linear-unit": "the same, the class token of length 1, as the blocks of the next ones are",
    "intermediate": "a linear layer on averages of four activations of every layer, as Head2Toe has it",
    "intermediate-select": "the same, a fifth of the features, selected by a group lasso",
    "vqt-1": "visual query tuning, one query token a layer",
    "vqt-5": "five query tokens a layer",
    "vqt-5-select": "the same, a fifth of the features, selected by a group lasso; queries stay, the head is trained anew",
    "prompts": "visual prompt tuning: 8 learned tokens in every layer, and a linear layer",
    "lora": "LoRA of rank 4 on queries and values, and a linear layer",
    "vqt-5+prompts": "five query tokens a layer on the prompted backbone",
    "vqt-5+lora": "five query tokens a layer on the backbone with LoRA",
    "full": "full fine-tuning",
}


def accuracies(target: str, method: str) -> list[float]:
    """In per cent, of every network."""
    return [100 * value for value in ARCHIVE.values(target, method, "training", "accuracy")]


def there() -> list[str]:
    """Targets on which the linear probe was trained as often as it should be."""
    return [target for target in TARGETS if len(accuracies(target, "linear")) >= NETWORKS]


def answer() -> str:
    """Is visual query tuning better than the others? Counted."""
    targets, lines = there(), []
    for method, bases in (
        ("vqt-5", ("linear", "linear-unit", "intermediate", "intermediate-select", "prompts", "lora", "full")),
        ("vqt-5+prompts", ("prompts",)),
        ("vqt-5+lora", ("lora", "full")),
    ):
        for base in bases:
            gains = {target: gain(accuracies(target, base), accuracies(target, method)) for target in targets}
            told = "; ".join(f"{word} on {', '.join(each)}" for word, each in sides(gains).items() if each)
            if told:
                lines.append(f"- `{method}` beside `{base}`: {told}.")
    return helps(
        "Test accuracy after tuning with 1,000 labelled pictures; above or below by more than chance (95 %, draw by draw):",
        lines,
        "That is of a small backbone, trained on clothes, and of three small tasks; no more is claimed.",
    )


def about_the_backbone() -> str:
    """How good it is on what it was trained on."""
    found = ARCHIVE.values("backbone", SOURCE, "training")
    if not found:
        return ""
    one = found[0]
    return "\n\n".join([
        "## The backbone",
        f"A ViT of 6 layers, width 64, 4 heads, 64 patches and a class token ({one['parameters']:,} parameters), trained here from the beginning on the 60,000 "
        f"pictures of Fashion-MNIST, with {one['updates']:,} updates of 64 (AdamW, one-cycle rate, flips). It gets {100 * one['accuracy']:.1f} % of its 10,000 test pictures right. All "
        "pictures are 3 × 32 × 32: grey ones are padded (the 8 × 8 digits enlarged four times) and repeated in three channels.",
    ])  # fmt: skip


def transfers() -> str:
    """What each method learns on each target."""
    targets = there()
    if not targets:
        return ""
    rows = [
        [method, TOLD[method], *(spread(accuracies(target, method)) for target in targets), learned(targets, method)]
        for method in METHODS
    ]
    return "\n\n".join([
        "## Transfer with 1,000 labelled pictures",
        f"Test accuracy in per cent, mean ± sample deviation over {NETWORKS} draws of the labelled pictures. Adam, 20 epochs of 64, no augmentation, no weight decay; where features are selected, 20 for each stage. Learning rates of a method on a target are "
        "chosen once by 200 of the first 1,000 pictures after 10 epochs; then a network is trained on all 1,000, and the test pictures are seen once, after the last update. *Learned* are parameters, those of the head with them.",
        table(["method", "what it is", *targets, "learned"], rows),
        verdict(targets),
        table(
            ["target", "tested on", *METHODS],
            [[target, f"{ARCHIVE.values(target, 'linear', 'training', 'tested_on')[0]:,}", *(rate(target, method) for method in METHODS)] for target in targets],
        ),
        "The last table has the chosen rates: of head and query tokens, and behind the stroke of what learns inside the backbone. Where features are selected, heads are trained at half of it; a star is at an edge of what was tried. "
        f"Tried were {tried(FROZEN)} beside a frozen backbone, {tried(LEARNING)} with one that learns.",
    ])  # fmt: skip


def tried(rates: Sequence[tuple[float, float]]) -> str:
    """Learning rates as text."""
    return ", ".join(" / ".join(f"{each:g}" for each in rate if each) for rate in rates)


def learned(targets: Sequence[str], method: str) -> str:
    """How many parameters a method learns."""
    found = [value for target in targets for value in ARCHIVE.values(target, method, "training", "learned_parameters")]
    return f"{found[0]:,}" if found else "–"


def rate(target: str, method: str) -> str:
    """The chosen learning rate."""
    found = ARCHIVE.values(target, method, "training", "rate")
    if not found:
        return "–"
    tried = list(zip(*METHODS[method]["rates"], strict=True))
    return " / ".join(
        f"{each:g}" + ("\\*" if each in (min(of), max(of)) and len({*of}) > 2 else "")
        for each, of in zip(found[0], tried, strict=True)
        if each
    )


def verdict(targets: Sequence[str]) -> str:
    """Visual query tuning against probes, features of all layers, fine-tuning and its partners alone."""
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
        "Points above another method, draw by draw (mean, and what holds it in 95 % of all cases by Student's t; bold where it is more). Draws of the 1,437 digits of scikit-learn "
        "share most of their pictures, so what holds is too narrow there."
    )
    return f"{text}\n\n{table(['above', 'method', *targets], lines)}"


def costs() -> str:
    """At the shape of ViT-small."""
    found = ARCHIVE.values("cost", "vit-small", "cost", "methods")
    if not found:
        return ""
    methods = found[0]
    full = methods["full"]
    rows = [
        [name, f"{m['learned_parameters']:,}", *ratio(m, full, "kept_megabytes", 0), *ratio(m, full, "grown_megabytes", 0), *ratio(m, full, "forward_seconds", 2), *ratio(m, full, "backward_seconds", 2)]
        for name, m in methods.items() if name in WAYS
    ]  # fmt: skip
    head = ["method", "learned"]
    for what in ("kept, MB", "grown by, MB", "forward, s", "backward, s"):
        head += [what, "of full"]
    return "\n\n".join([
        "## What an update costs at the shape of ViT-small",
        "12 layers, width 384, 6 heads, 197 tokens, 100 classes, random pictures, batches of 8, one thread. *Kept*: saved tensors of the forward pass, parameters aside. *Grown by*: how far a process of its own grows in two updates "
        "with Adam, gradients and the optimiser's state included. Times are medians, in turns. `released` runs queries and tokens as one sequence, as the released code does: the same values, and the graph of the whole backbone.",
        table(head, rows),
        f"Peak growth of `vqt-1` over that of full fine-tuning: {methods['vqt-1']['grown_megabytes'] / full['grown_megabytes']:.3f}; of `vqt-10`: {methods['vqt-10']['grown_megabytes'] / full['grown_megabytes']:.3f}; the released way with 10 tokens: "
        f"{methods['vqt-10, released']['grown_megabytes'] / full['grown_megabytes']:.3f}.",
    ])  # fmt: skip


def ratio(method: dict[str, Any], base: dict[str, Any], key: str, digits: int) -> tuple[str, str]:
    """A number, and what it is of that of full fine-tuning."""
    return f"{method[key]:,.{digits}f}", f"{method[key] / base[key]:.3f}"


def recorded() -> str:
    """Certificates, sums and pictures."""
    rows, figures = [], []
    for target in TARGETS:
        for training, asked in zip(
            ARCHIVE.values("recorded", target, "training"), ARCHIVE.values("recorded", target, "asked"), strict=False
        ):
            own, total = (sum(asked[key]) / len(asked[key]) for key in ("own_class", "total"))
            rows.append([target, f"{100 * training['accuracy']:.1f}", f"{training['visits']:,}", f"{training['memory_megabytes']:.0f}",
                         *(f"{training['certificate'][name]:.1e} ({training['floor'][name]:.1e})" for name in ("head.weight", "head.bias")),
                         training["marks"], f"{asked['off']:.0e}", f"{asked['residual']:.0e}", f"{own:+.0f}", f"{total - own:+.0f}"])  # fmt: skip
            image = ARCHIVE.images / f"recorded-{target}-asked.png"
            if image.exists():
                figures.append(
                    f"### {target}\n\n![Test pictures and the training pictures that their logits are made of, {target}](../images/vqt/{image.name})"
                )
    if not rows:
        return ""
    return "\n\n".join([
        "## Recorded and asked",
        "The backbone is frozen, so the head is the only linear layer that learns, and its memory is small and complete: a logit is an exact sum over the visits of the transfer set, and what the head began with. Query tokens "
        "learn too, and are the rest: kept as snapshots, not attributed. `vqt-5`, recorded in float32, Adam at 0.01, 20 epochs of 1,000 pictures. *Weights*, *biases*: the certificate, beside it the floor that rounding of training in float32 sets; biases begin at −4.6 and "
        "hardly move, so that of them is high. *Off*: the largest difference between the logits rebuilt from the memory and the network's own, on four test "
        "pictures. *Residual*: parts by class against the logit, relative. *Own class*, *all else*: what training pictures of the predicted class add to its logit, mean over the four, and what all others, biases and first weights do.",
        table(["target", "accuracy, %", "visits", "memory, MB", "weights", "biases", "marks", "off", "residual", "own class", "all else"], rows),
        "In the figures, left a test picture, then where the query tokens of the last layer look (mean over tokens and heads), then the training pictures that add most to its logit over all their visits.",
        *figures,
    ])  # fmt: skip


HEAD = """# Visual query tuning

After Tu, Mai, Chao (2023), *Visual Query Tuning: Towards Effective Usage of Intermediate Representations for Parameter and Memory Efficient Transfer
Learning*, arXiv 2212.03220. This page is made by `python -m experiments.vqt.page` from the run folders of

    dualform reproduce vqt

**Claim of the paper.** A few learned tokens a layer that only ask, over a frozen vision transformer, summarise its intermediate features for a linear
head: better than other uses of intermediate features, in many cases better than fine-tuning, and with little memory, since nothing has to be
propagated through the backbone.

## Where we differ

1. The paper's benchmark (VTAB-1k: 19 tasks) and its checkpoints (ImageNet, MAE) are not at hand. A small backbone is trained here on Fashion-MNIST and
   tuned on 1,000 pictures each of MNIST, CIFAR-10 and scikit-learn's 8 × 8 digits. No number of the paper can be compared with these, and none is quoted.
2. The paper's text was not at hand either: the method is that of a specification after its abstract and released code. Where the released code keeps
   the graph of the whole backbone, ours does not; both are measured.
3. 20 epochs of batches of 64 instead of 100 of 128, the first of them at half the rate; five or eight learning rates instead of 20 settings, no weight decay, no dropout of queries, a
   fifth of the features kept wherever some are selected; three draws of the labelled pictures instead of five seeds.
4. The head over features of all layers is in the manner of Head2Toe, not its code: four activations a layer, averaged over tokens."""


def main() -> None:
    """Collect results and write the page, or restore run folders."""
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
